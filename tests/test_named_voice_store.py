"""References of built-in voices on disk: one for all servers that share a directory, and one for each checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from service.voices import FOLDER, UNFINISHED, load_named, save_named, weights_of


def reference(value: float) -> np.ndarray:
    return np.full((3, 4, 2), value, np.float32)


def test_the_first_to_be_written_stays(tmp_path: Path) -> None:
    save_named(tmp_path, "key", reference(1))
    save_named(tmp_path, "key", reference(2))
    kept = load_named(tmp_path, "key")
    assert kept is not None and np.array_equal(kept, reference(1))
    assert len(list((tmp_path / FOLDER).iterdir())) == 1


def test_a_damaged_one_is_replaced(tmp_path: Path) -> None:
    save_named(tmp_path, "key", reference(1))
    (tmp_path / FOLDER / "key.safetensors").write_bytes(b"damaged")
    assert load_named(tmp_path, "key") is None
    save_named(tmp_path, "key", reference(2))
    kept = load_named(tmp_path, "key")
    assert kept is not None and np.array_equal(kept, reference(2))


def test_what_a_killed_server_left_behind_is_deleted(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir()
    abandoned, under_way = (folder / f"{UNFINISHED}{n}" for n in "ab")
    abandoned.touch()
    os.utime(abandoned, times=(0, 0))
    under_way.touch()
    save_named(tmp_path, "key", reference(1))
    assert sorted(folder.iterdir()) == sorted([under_way, folder / "key.safetensors"])


def test_a_folder_that_is_none_stores_nothing(tmp_path: Path) -> None:
    (tmp_path / "voices").touch()
    save_named(tmp_path / "voices", "key", reference(1))
    assert load_named(tmp_path / "voices", "key") is None


def test_weights_are_told_apart_wherever_they_lie(tmp_path: Path) -> None:
    def checkpoint(folder: str, weights: bytes, **more: bytes) -> str:
        directory = tmp_path / folder / "model"
        directory.mkdir(parents=True)
        for name, data in {"model": weights, **more}.items():
            (directory / f"{name}.safetensors").write_bytes(data)
        (directory / "notes.txt").write_text(folder)
        return weights_of(directory)

    weights = np.random.default_rng(0).bytes(3_000_000)
    first = checkpoint("a", weights)
    assert first == checkpoint("b", weights)
    tuned = bytearray(weights)
    tuned[1_000_000:1_100_000] = bytes(100_000)
    others = [
        checkpoint("c", bytes(tuned)),
        checkpoint("d", weights[:-1]),
        checkpoint("e", weights[:-1] + b"!"),
        checkpoint("f", b"!" + weights[1:]),
        checkpoint("g", weights, audiovae=b"codec"),
        checkpoint("h", b""),
    ]
    assert len({first, *others}) == 7
