"""Reference outputs: tests/golden, or another directory with the same family folders.

    REPRISE_GOLDEN=/path/to/another pytest ...

What a test needs to know of a fixture it reads from the fixture: the prompts and lengths of inputs.json, the names and
shapes of expected.safetensors, the limits of the configuration files.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from models.checkpoints.registry import Family

OWN = Path(__file__).resolve().parent.parent / "golden"
GOLDEN = Path(os.environ.get("REPRISE_GOLDEN") or OWN).resolve()

fact_of_own_fixture = pytest.mark.skipif(GOLDEN != OWN, reason="tells of the fixture in tests/golden")


def is_chat(family: Family) -> bool:
    """Whether its fixture has prompts of chats."""
    return family.kind == "chat" and family.task is None


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """One of a golden directory's JSON files."""
    content: dict[str, Any] = json.loads((directory / name).read_text())
    return content


def change_json(path: Path, changes: dict[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def inputs(directory: Path) -> dict[str, Any]:
    return read_json(directory, "inputs.json")


def prompts(directory: Path) -> tuple[str, ...]:
    """Names of the prompts, in the fixture's order, without those that cut the frames of a video into crops: no request
    asks for that."""
    return tuple(name for name, spec in inputs(directory)["prompts"].items() if spec.get("max_slice_nums", 1) == 1)


def media_files(directory: Path, name: str, kind: str = "image") -> list[Any]:
    """Paths of a prompt's pictures or videos, in order: a file below the directory, or a list of files."""
    return [part[kind] for part in golden_parts(directory, name) if part["type"] == kind]


def golden_parts(directory: Path, name: str) -> list[dict[str, Any]]:
    """A prompt's pictures and videos in order, as inputs.json has them."""
    contents = [message["content"] for message in inputs(directory)["prompts"][name]["messages"]]
    return [part for content in contents if not isinstance(content, str) for part in content if part["type"] != "text"]


def copy_checkpoint(directory: Path, target: Path) -> Path:
    """A golden directory's checkpoint without the references, at `target`, to be changed."""
    references = shutil.ignore_patterns("images", "expected.safetensors", "inputs.json", "README.md")
    shutil.copytree(directory, target, ignore=references)
    return target


def rename_as_in_memory(checkpoint: Path) -> None:
    """Gives the tensors of a Qwen-VL checkpoint the names that they have in memory under transformers 5."""
    tensors = load_file(checkpoint / "model.safetensors")
    renamed = {
        f"model.{name}" if name.startswith("visual.") else name.replace("model.", "model.language_model.", 1): value
        for name, value in tensors.items()
    }
    save_file(renamed, checkpoint / "model.safetensors")


def with_most(directory: Path, kind: str = "image") -> str:
    """The prompt with the most pictures, or videos."""
    return max(prompts(directory), key=lambda name: len(media_files(directory, name, kind)))


def with_fewest(directory: Path, kind: str = "image") -> str:
    """The prompt with the fewest pictures, but one at least."""
    counts = {name: len(media_files(directory, name, kind)) for name in prompts(directory)}
    return min((name for name in counts if counts[name]), key=counts.__getitem__)


def numbered(names: Iterable[str], start: str, end: str) -> list[str]:
    """Names of the form START<number>END, in the order of their numbers, without END."""
    found = (name.removesuffix(end) for name in names if name.startswith(start) and name.endswith(end))
    return sorted(found, key=lambda name: int(name.removeprefix(start)))
