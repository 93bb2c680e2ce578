"""What Ray Serve adds to a request: its proxy, and the front that chooses a replica, beside the same replica asked
directly. On a CPU.

    python -m benchmarks.ray_hop [--haproxy] [--requests 200]

--haproxy: behind the HAProxy that Ray brings along, instead of Ray's own proxy, which is written in Python.

One replica on this machine serves the embedded models. Once it has captured its graphs, one client asks the two
addresses in turn, one request at a time, on connections that stay open: for the list of models, for one token of chat,
and about a new picture. Ray's part is the difference of the lower quartiles, since Ray's other processes, which share
the processors, only add.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.measure.command_line import command_line
from benchmarks.measure.record import Row, record
from benchmarks.servers.process import Server, reserved_port
from service.cli.bench.traffic import ChatLoad, payload

MODEL = "reprise/qwen2_vl"
WARM_UP = 20
TIMEOUT = 120.0
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",  # Ray listens wide: only who knows the token may talk to it
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "OMP_NUM_THREADS": "1",
    # Seconds. On a busy machine a proxy needs more than the usual 5 and 10, after which it is killed.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "120",
}
HAPROXY = {"CONFIG_FILE_LOC": "cfg", "SOCKET_PATH": "socket", "SERVER_STATE_BASE": "", "SERVER_STATE_FILE": "state"}
"""Its files, which otherwise lie in a folder that all clusters of a machine share, as they do two ports."""
OBJECT_STORE_BYTES = 100 << 20


@contextlib.contextmanager
def ray_serve(folder: Path) -> Iterator[str]:
    """Ray Serve on this machine alone, with its files in a folder of a short name, since there are sockets among them;
    the URL of its proxy."""
    import ray
    from ray import serve

    try:
        ray.init(
            num_cpus=4,
            num_gpus=0,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(folder),
        )
        with reserved_port() as port:
            serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
            yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


@contextlib.contextmanager
def cluster(haproxy: bool) -> Iterator[tuple[str, str]]:
    """URLs of the proxy and of the only replica."""
    with (
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as name,
        reserved_port() as metrics_port,
        reserved_port() as stats_port,
    ):
        folder = Path(name)
        os.environ.update(ENVIRONMENT)
        if haproxy:
            os.environ["RAY_SERVE_ENABLE_HA_PROXY"] = "1"
            os.environ.update({f"RAY_SERVE_HAPROXY_{key}": str(folder / file) for key, file in HAPROXY.items()})
            ports = {"METRICS": metrics_port, "STATS": stats_port}
            os.environ.update({f"RAY_SERVE_HAPROXY_{key}_PORT": str(port) for key, port in ports.items()})
        from ray import serve

        from deploy.ray.app import build

        with ray_serve(folder) as url:
            settings = {"device": "cpu", "voices_dir": str(folder / "voices")}
            app = build({"gpus": 0, "cpus": 1, "max_replicas": 1, "settings": settings})
            serve.run(app, name="reprise", route_prefix="/")
            ((target,),) = (group["targets"] for group in httpx.get(f"{url}/metrics/targets", timeout=TIMEOUT).json())
            replica = Server(f"http://{target}", ready_seconds=0.0, log=folder, pid=os.getpid())
            replica.wait_for_captures()
            yield url, replica.url


def requests(count: int) -> dict[str, Callable[[int], tuple[str, str, dict[str, Any] | None]]]:
    """By name: method, path and body of a request by its number."""

    def chats(images: int) -> list[dict[str, Any]]:
        sizes: dict[str, Any] = {"images": images, "width": 56, "height": 56, "text_words": 4, "output_tokens": 1}
        load = ChatLoad(url="", model=MODEL, requests=count, seed=images, **sizes)
        rng = np.random.default_rng(images)
        return [dict(payload(load, rng), stream=False) for _ in range(count)]

    texts, pictures, path = chats(0), chats(1), "/v1/chat/completions"
    return {
        "GET /v1/models": lambda number: ("GET", "/v1/models", None),
        "one token of chat": lambda number: ("POST", path, texts[number]),
        "one token about a new picture": lambda number: ("POST", path, pictures[number]),
    }


def measured(proxy: str, replica: str, count: int) -> Iterator[tuple[Row, dict[str, Any]]]:
    with httpx.Client(timeout=TIMEOUT, trust_env=False) as client:
        for name, request in requests(2 * (count + WARM_UP)).items():
            seconds: dict[str, list[float]] = {proxy: [], replica: []}
            for number in range(count + WARM_UP):
                for place, url in enumerate((proxy, replica)):
                    method, path, body = request(2 * number + place)
                    began = time.perf_counter()
                    client.request(method, url + path, json=body).raise_for_status()
                    if number >= WARM_UP:
                        seconds[url].append(time.perf_counter() - began)
            found = {"request": name, **quantiles("through_ray", seconds[proxy])}
            found |= quantiles("direct", seconds[replica])
            yield {**found, "hop_ms": found["through_ray_p25_ms"] - found["direct_p25_ms"]}, {}


def quantiles(name: str, seconds: Sequence[float]) -> Row:
    return {f"{name}_p{share}_ms": 1e3 * float(np.quantile(seconds, share / 100)) for share in (25, 50, 90)}


def main(words: Sequence[str] | None = None) -> Path:
    parser = command_line("benchmarks.ray_hop", __doc__)
    parser.add_argument("--requests", type=int, default=200, help="of each kind to each address")
    parser.add_argument("--haproxy", action="store_true")
    options = parser.parse_args(words)
    name = "ray_hop_haproxy" if options.haproxy else "ray_hop"
    with cluster(options.haproxy) as (proxy, replica):
        return record(name, measured(proxy, replica, options.requests), ray=version("ray"))


if __name__ == "__main__":
    main()
