"""Tries the API process where torch is not installed: imports, settings, commands, an answer of a fake engine."""

from __future__ import annotations

import importlib
import importlib.util
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
ON_A_GPU = ("torch", "triton", "ray")
NEEDED = {
    "service.cli",
    "service.processes.server",
    "service.api.app",
    "service.hub.catalog",
    "models.qwen_vl.processor",
}


def modules() -> list[str]:
    paths = [path for top in ("models", "service") for path in (ROOT / top).rglob("*.py")]
    dotted = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    names = (name.removesuffix(".__init__") for name in dotted if "make_" not in name)
    return sorted(name for name in names if not name.endswith("__main__"))  # importing one runs its command


def imported() -> list[str]:
    """What can be imported without torch. Any other error is raised."""
    good = []
    for name in modules():
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.split(".")[0] not in ON_A_GPU:
                raise
        else:
            good.append(name)
    return good


def answer() -> str:
    """Of a server whose engine is a fake in a thread."""
    import httpx

    from tests.support.servers import running_server

    with running_server() as server:
        body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
        response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        response.raise_for_status()
        return str(response.json()["choices"][0]["message"]["content"])


def main() -> int:
    assert importlib.util.find_spec("torch") is None, "this is for environments without torch"
    good = imported()
    assert set(good) >= NEEDED, f"cannot be imported without torch: {NEEDED - set(good)}"
    for arguments in (["--help"], ["serve", "--help"], ["serve", "--print-config"]):
        command = [sys.executable, "-m", "service.cli", *arguments]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    assert answer() == "hell"
    print(f"Python {platform.python_version()}: {len(good)} modules, the command line and an answer over HTTP")
    return 0


if __name__ == "__main__":
    sys.exit(main())
