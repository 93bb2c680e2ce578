"""The hub on loopback with one good repository, and huggingface_hub pointed at it and at an empty cache."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants, file_download

from tests.support.loopback_hub import LoopbackHub, Repository, loopback_hub

GOLDEN = Path(__file__).parents[1] / "golden" / "qwen2_vl"
REFERENCE = ("expected.safetensors", "inputs.json", "README.md")


def published_files() -> dict[str, bytes]:
    """The golden checkpoint without its reference outputs."""
    files = (path for path in sorted(GOLDEN.iterdir()) if path.is_file() and path.name not in REFERENCE)
    return {path.name: path.read_bytes() for path in files}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[LoopbackHub]:
    with loopback_hub() as running:
        running.repositories["owner/name"] = Repository(published_files())
        # Read from the environment once, when huggingface_hub is imported.
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        template = running.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "no-token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        # A second before each of five attempts.
        at_once = SimpleNamespace(**vars(time) | {"sleep": lambda seconds: None})
        monkeypatch.setattr(file_download, "time", at_once)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.delenv(name, raising=False)
        yield running
