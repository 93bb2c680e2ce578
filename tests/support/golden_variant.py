"""Another golden directory, made out of tests/golden: other names, another order, fewer prompts, shorter answers.

Its expected values are those of the first: what an answer begins with does not change with its length.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

PREFIX = "other_"
TOKENS = 9
"""Of each answer."""


def make_variant(source: Path, target: Path) -> None:
    """Family folders of `source` in `target`."""
    for folder in sorted(path.parent for path in source.glob("*/inputs.json")):
        shutil.copytree(folder, target / folder.name)
        if folder.name == "voxcpm2":
            _rename_modes(target / folder.name)
        else:
            _change_prompts(target / folder.name)


def _change_prompts(directory: Path) -> None:
    """The first prompt goes, the others come in reverse order under other names; images change their numbers."""
    inputs = json.loads((directory / "inputs.json").read_text())
    tensors = load_file(directory / "expected.safetensors")
    images = sorted((directory / "images").glob("image*.png"))
    numbers = {str(index): str(len(images) - 1 - index) for index in range(len(images))}

    def renumber(text: str) -> str:
        return re.sub(r"\bimage(\.?)(\d+)", lambda match: f"image{match[1]}{numbers[match[2]]}", text)

    moved = {directory / "images" / renumber(path.stem): path.read_bytes() for path in images}
    for path, content in moved.items():
        path.with_suffix(".png").write_bytes(content)
    kept = list(inputs["prompts"])[:0:-1]
    prompts = json.loads(renumber(json.dumps({PREFIX + name: inputs["prompts"][name] for name in kept})))
    (directory / "inputs.json").write_text(json.dumps(inputs | {"prompts": prompts, "max_new_tokens": TOKENS}))
    renamed: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if not name.startswith("prompt."):
            renamed[renumber(name)] = value
        elif (prompt := name.split(".")[1]) in kept:
            answer = ".generated_" in name or name.endswith(".penalised_ids")
            cut = value[:TOKENS].clone() if answer else value
            renamed[name.replace(f"prompt.{prompt}.", f"prompt.{PREFIX}{prompt}.")] = cut
    save_file(renamed, directory / "expected.safetensors")


def _rename_modes(directory: Path) -> None:
    inputs = json.loads((directory / "inputs.json").read_text())
    modes = list(inputs["modes"])
    inputs["modes"] = {PREFIX + mode: inputs["modes"][mode] for mode in reversed(modes)}
    inputs["stop_case"]["mode"] = PREFIX + inputs["stop_case"]["mode"]
    (directory / "inputs.json").write_text(json.dumps(inputs))
    tensors = load_file(directory / "expected.safetensors")
    renamed = {PREFIX + name if name.split(".")[0] in modes else name: value for name, value in tensors.items()}
    save_file(renamed, directory / "expected.safetensors")
