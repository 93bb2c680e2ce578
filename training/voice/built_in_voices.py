"""Make the references of an embedded checkpoint's built-in voices, which come with it: a server that finds them need
not make them. Run it after each training, since other weights have other voices.

python -m training.voice.built_in_voices CHECKPOINT
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import numpy as np
from safetensors.numpy import load_file

PORT = 8399
URL = f"http://127.0.0.1:{PORT}"


def make(checkpoint: Path, voices: Path) -> dict[str, np.ndarray]:
    """References by key, made by a server with these voices."""
    command = [sys.executable, "-m", "service.cli", "serve", "--model", str(checkpoint), "--port", str(PORT)]
    with subprocess.Popen([*command, "--voices-dir", str(voices)]) as server:
        try:
            while server.poll() is None:
                time.sleep(1.0)
                with contextlib.suppress(httpx.HTTPError):
                    httpx.get(f"{URL}/ready").raise_for_status()
                    break
            for voice in httpx.get(f"{URL}/v1/audio/voices").json()["data"]:
                speech = {"input": "Hello.", "voice": voice["id"]}
                httpx.post(f"{URL}/v1/audio/speech", json=speech, timeout=600).raise_for_status()
        finally:
            server.terminate()
    return {path.stem: load_file(path)["reference"] for path in sorted((voices / ".named").glob("*.safetensors"))}


if __name__ == "__main__":
    checkpoint = Path(sys.argv[1]).resolve()
    shipped = checkpoint / "built_in_voices.npz"
    shipped.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        references = make(checkpoint, Path(folder))
    np.savez_compressed(shipped, allow_pickle=False, **references)
    print(f"{len(references)} voices, {shipped.stat().st_size} bytes")
