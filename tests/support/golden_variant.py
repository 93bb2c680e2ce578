"""Another golden directory, made out of tests/golden: other names, another order, fewer prompts, shorter answers, other
sizes.

Its expected values are those of the first: what an answer begins with does not change with its length, and what is
added to widths are zeros, which change no value.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

PREFIX = "other_"
TOKENS = 9
"""Of each answer."""
MORE = 32
"""Added to the width of the language models' MLPs."""
CHANNELS = 4
"""Added to those of a latent."""


def make_variant(source: Path, target: Path) -> None:
    """Family folders of `source` in `target`."""
    for folder in sorted(path.parent for path in source.glob("*/inputs.json")):
        shutil.copytree(folder, target / folder.name)
        if folder.name == "voxcpm2":
            _rename_modes(target / folder.name)
            _add_channels(target / folder.name)
        elif not folder.name.startswith("qwen3_asr"):
            _change_prompts(target / folder.name)
            _widen(target / folder.name)


def _change_prompts(directory: Path) -> None:
    """The first prompt goes, unless it is the one of which routes to experts are recorded; the others come in reverse
    order under other names; images change their numbers."""
    inputs = json.loads((directory / "inputs.json").read_text())
    tensors = load_file(directory / "expected.safetensors")
    images = sorted((directory / "images").glob("image*.png"))
    numbers = {str(index): str(len(images) - 1 - index) for index in range(len(images))}

    def renumber(text: str) -> str:
        return re.sub(r"\bimage(\.?)(\d+)", lambda match: f"image{match[1]}{numbers[match[2]]}", text)

    moved = {directory / "images" / renumber(path.stem): path.read_bytes() for path in images}
    for path, content in moved.items():
        path.with_suffix(".png").write_bytes(content)
    gone = next(name for name in inputs["prompts"] if f"prompt.{name}.expert_ids" not in tensors)
    kept = [name for name in reversed(inputs["prompts"]) if name != gone]
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


def _widen(directory: Path) -> None:
    """Wider MLPs in the language model, or shared experts, and twice as many positions."""
    config = json.loads((directory / "config.json").read_text())
    text = config.get("text_config", config)
    field = "intermediate_size" if "intermediate_size" in text else "shared_expert_intermediate_size"
    width = text[field]
    text[field] += MORE
    text["max_position_embeddings"] *= 2
    (directory / "config.json").write_text(json.dumps(config))
    for file in directory.glob("model*.safetensors"):
        tensors = load_file(file)
        for name, value in tensors.items():
            dense = re.search(r"layers\.\d+\.mlp\.(shared_expert\.)?(gate|up|down)_proj\.weight$", name)
            if not dense or width not in value.shape:
                continue
            tensors[name] = F.pad(value, (0, MORE) if "down" in name else (0, 0, 0, MORE))
        save_file(tensors, file, metadata={"format": "pt"})


def _add_channels(directory: Path) -> None:
    """More channels in the latents of speech, which are zeros and read by nothing."""
    config = json.loads((directory / "config.json").read_text())
    before = config["feat_dim"]
    config["feat_dim"] = config["audio_vae_config"]["latent_dim"] = before + CHANNELS
    (directory / "config.json").write_text(json.dumps(config))
    columns, rows = (0, CHANNELS), (0, 0, 0, CHANNELS)
    for name, patterns in {
        "model.safetensors": {r".*\.(cond|in)_proj\.weight": columns, r".*estimator\.out_proj\.weight": rows}
        | {r".*estimator\.out_proj\.bias": columns},
        "expected.safetensors": {
            r".*\.(feat|patches)|in\.locenc\.x|vae\..*_patches": columns,
            r".*\.noise|.*\.(cfm|dit)\..*|vae\.(decode\.z|encode\.latent)": rows,
        },
    }.items():
        tensors = load_file(directory / name)
        for key, value in tensors.items():
            for pattern, pad in patterns.items():
                if re.fullmatch(pattern, key) and before in value.shape[-len(pad) // 2 :][:1]:
                    tensors[key] = F.pad(value, pad)
        save_file(tensors, directory / name)
    codec = torch.load(directory / "audiovae.pth", weights_only=True)
    for key, value in codec["state_dict"].items():
        if key.endswith("decoder.model.1.weight_v"):
            codec["state_dict"][key] = F.pad(value, (0, 0, 0, CHANNELS))
        elif re.search(r"encoder\.fc_(mu|logvar)\.|decoder\.model\.0\.", key):
            # A direction that is not zero, and a length that is.
            more = torch.full_like(value[:CHANNELS], float(key.endswith("weight_v")))
            codec["state_dict"][key] = torch.cat((value, more))
    torch.save(codec, directory / "audiovae.pth")
