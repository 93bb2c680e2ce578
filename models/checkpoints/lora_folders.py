"""Adapters as voices: each subfolder of a directory holds one, and its name is the voice's name. Torch-free."""

from __future__ import annotations

from pathlib import Path

from models.interfaces.errors import CheckpointError

CONFIG = "lora_config.json"
WEIGHTS = "lora_weights.safetensors"


def adapter_folders(directory: Path) -> list[Path]:
    """Folders of all adapters, by name; hidden folders are left out. CheckpointError for a directory that cannot be
    read, and for a folder that holds no adapter."""
    try:
        folders = sorted(path for path in directory.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError as error:
        raise CheckpointError(f"lora_voices: {directory} cannot be read ({error.strerror})") from error
    for folder in folders:
        for name in (CONFIG, WEIGHTS):
            if (folder / name).is_file():
                continue
            others = sorted(path.name for path in folder.iterdir() if path.suffix in (".ckpt", ".pt", ".pth", ".bin"))
            if name == WEIGHTS and others:
                raise CheckpointError(
                    f"{folder / others[0]}: pickled weights are not read; convert them to {WEIGHTS} with "
                    "safetensors.torch.save_file"
                )
            raise CheckpointError(f"lora_voices: {folder} has no {name}")
    return folders
