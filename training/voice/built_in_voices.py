"""Make the references of an embedded checkpoint's built-in voices, which come with it: a server that finds them need
not make them. Run it after each training, since other weights have other voices.

python -m training.voice.built_in_voices CHECKPOINT
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import httpx
import numpy as np
from safetensors.numpy import load_file

from service.cli.bench.report import started

LONGEST = 3600.0
"""Seconds until the server is ready."""


def make(checkpoint: Path, voices: Path) -> dict[str, np.ndarray]:
    """References by key, made by a server with these voices."""
    flags = ["--model", str(checkpoint), "--voices-dir", str(voices)]
    with started(flags, time.monotonic() + LONGEST) as (url, _):
        for voice in httpx.get(f"{url}/v1/audio/voices", trust_env=False).json()["data"]:
            speech = {"input": "Hello.", "voice": voice["id"]}
            httpx.post(f"{url}/v1/audio/speech", json=speech, timeout=600, trust_env=False).raise_for_status()
    return {path.stem: load_file(path)["reference"] for path in sorted((voices / ".named").glob("*.safetensors"))}


if __name__ == "__main__":
    checkpoint = Path(sys.argv[1]).resolve()
    shipped = checkpoint / "built_in_voices.npz"
    shipped.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        references = make(checkpoint, Path(folder))
    np.savez_compressed(shipped, allow_pickle=False, **references)
    print(f"{len(references)} voices, {shipped.stat().st_size} bytes")
