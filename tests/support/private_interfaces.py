"""What the product uses of other packages beyond what these promise to keep: docs/private_interfaces.md explains it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Interface:
    """package: as it is installed. versions: for which it was tried, a specifier. names: `module:attribute`, where the
    attribute may have dots; `module:Class().attribute` is one of an instance. users: files of the product."""

    package: str
    versions: str
    names: tuple[str, ...]
    users: tuple[str, ...]


H11 = "uvicorn.protocols.http.h11_impl:H11Protocol()."
SOCKETS = "uvicorn.protocols.websockets.websockets_sansio_impl:WebSocketsSansIOProtocol()."

INTERFACES = (
    Interface(
        "torch",
        ">=2.11,<2.16",
        (
            *("torch:_addmm_activation", "torch:_scaled_mm", "torch:_C._cuda_endAllocateToPool"),
            *("torch:UntypedStorage._cdata", "torch.utils._python_dispatch:TorchDispatchMode"),
            "torch._subclasses.fake_tensor:DataDependentOutputException",
            "torch._subclasses.fake_tensor:DynamicOutputShapeException",
            "torch._subclasses.fake_tensor:FakeTensorMode",
        ),
        ("mlp.py", "e4m3.py", "pool.py", "memory.py", "audit.py"),
    ),
    Interface("pillow", ">=12.2,<14", ("PIL.Image:Image()._mode", "PIL.Image:Image()._size"), ("image_decode.py",)),
    Interface(
        "triton",
        ">=3.6,<3.9",
        (
            *("triton:AsyncCompileMode", "triton:knobs.cache.dir", "triton:knobs.compilation.listener"),
            "triton.runtime.jit:JITFunction.run",
        ),
        ("precompile.py",),
    ),
    Interface(
        "uvicorn",
        ">=0.54,<1",
        (
            *(f"{H11}{name}" for name in ("app", "config", "conn", "connections", "cycle", "headers", "loop")),
            *(f"{H11}{name}" for name in ("transport", "connection_lost", "connection_made", "data_received")),
            *(f"{H11}{name}" for name in ("handle_websocket_upgrade", "on_response_complete", "send_400_response")),
            *(f"{H11}{name}" for name in ("shutdown", "timeout_keep_alive_handler")),
            *(f"{SOCKETS}{name}" for name in ("app", "close_sent", "config", "conn", "frames", "handshake_complete")),
            *(f"{SOCKETS}{name}" for name in ("transport", "data_received", "handle_bytes", "handle_cont")),
            *(f"{SOCKETS}{name}" for name in ("handle_parser_exception", "handle_ping", "handle_pong", "handle_text")),
            *(f"uvicorn.server:Server.{name}" for name in ("handle_exit", "startup", "shutdown")),
            "uvicorn.lifespan.on:LifespanOn.shutdown",
        ),
        ("connections.py", "server.py"),
    ),
    Interface("h11", ">=0.16,<0.17", ("h11:Connection.send", "h11._headers:Headers.raw_items"), ("connections.py",)),
    Interface(
        "prometheus_client",
        ">=0.22,<1",
        tuple(f"prometheus_client:Histogram().{name}" for name in ("_sum.inc", "_buckets", "_upper_bounds")),
        ("metrics.py",),
    ),
)
