"""Make the references of an embedded checkpoint's built-in voices, which come with it: a server that finds them need
not make them. Run it after each training, since other weights have other voices.

python -m training.voice.built_in_voices CHECKPOINT
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

PORT = 8399
URL = f"http://127.0.0.1:{PORT}"


def make(checkpoint: Path, voices: Path) -> dict[str, np.ndarray]:
    """References by key, made by a server with these voices."""
    command = [sys.executable, "-m", "service.cli", "serve", "--model", str(checkpoint), "--port", str(PORT)]
    server = subprocess.Popen([*command, "--voices-dir", str(voices)])
    try:
        while server.poll() is None:
            time.sleep(1.0)
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{URL}/ready"):
                break
        with urllib.request.urlopen(f"{URL}/v1/audio/voices") as answer:
            names = [voice["id"] for voice in json.load(answer)["data"]]
        for name in names:
            body = json.dumps({"input": "Hello.", "voice": name}).encode()
            request = urllib.request.Request(f"{URL}/v1/audio/speech", body, {"content-type": "application/json"})
            urllib.request.urlopen(request).close()
    finally:
        server.terminate()
        server.wait()
    return {path.stem: load_file(path)["reference"] for path in sorted((voices / ".named").glob("*.safetensors"))}


if __name__ == "__main__":
    checkpoint = Path(sys.argv[1]).resolve()
    shipped = checkpoint / "built_in_voices.npz"
    shipped.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        references = make(checkpoint, Path(folder))
    np.savez_compressed(shipped, allow_pickle=False, **references)
    print(f"{len(references)} voices, {shipped.stat().st_size} bytes")
