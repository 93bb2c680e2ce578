"""Ray Serve on this machine alone."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path

from benchmarks.servers.process import reserved_port

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",  # Ray listens wide: only who knows the token may talk to it
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "OMP_NUM_THREADS": "1",
    # Seconds. On a busy machine a proxy needs more than the usual 5 and 10, after which it is killed.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "120",
}
OBJECT_STORE_BYTES = 100 << 20


@contextlib.contextmanager
def ray_serve(folder: Path) -> Iterator[str]:
    """With its files in a folder of a short name, since there are sockets among them; the URL of its proxy."""
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
