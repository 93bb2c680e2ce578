"""Trained states -> a checkpoint in the published layout.

python -m models.embedded.voices.export LM CODEC DIRECTORY
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from models.embedded.voices.codec import Codec, published
from models.embedded.voices.config import CHARACTERS, CONFIG, SPECIAL
from models.embedded.voices.network import Network

_SPOKEN = {"&": " and ", "%": " percent ", "+": " plus ", "=": " equals ", "@": " at ", "[–—;…]": ", ", "[‘’`´]": "'"}


def added_tokens() -> list[dict[str, Any]]:
    """The special tokens as tokenizer.json lists them."""
    rules = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return [{"id": id_, "content": text, **rules} for id_, text in SPECIAL.items()]


def tokenizer() -> dict[str, Any]:
    """One token a character. Capitals become small, accents fall, some signs become words; what is not known goes."""

    def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
        return {"type": "Replace", "pattern": pattern, "content": content}

    known = "a-z0-9.,?!':()"
    steps: list[dict[str, Any]] = [{"type": "NFD"}, {"type": "StripAccents"}, {"type": "Lowercase"}]
    steps += [replace({"Regex": sign if len(sign) > 1 else f"[{sign}]"}, word) for sign, word in _SPOKEN.items()]
    steps += [
        replace({"Regex": r"[\s/_\-]+"}, " "),
        replace({"Regex": f"[^{known} ]"}, ""),
        replace({"Regex": r" +"}, " "),
        replace({"Regex": r"^ | $"}, ""),
        replace({"String": " "}, "▁"),
    ]
    vocabulary = {text: id_ for id_, text in SPECIAL.items()}
    vocabulary.update({character: id_ for id_, character in enumerate(CHARACTERS, start=3)})
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens(),
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [replace({"String": "▁"}, " "), {"type": "Fuse"}]},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": dict(sorted(vocabulary.items(), key=lambda item: item[1])),
            "merges": [],
        },
    }


def network_tensors(model: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of a training's state: the network without the helpers, bfloat16."""
    prefix = "network."
    tensors = {name.removeprefix(prefix): value for name, value in model.items() if name.startswith(prefix)}
    return {name: value.to(torch.bfloat16).contiguous() for name, value in tensors.items()}


def write(
    directory: Path,
    network: dict[str, Tensor],
    codec: dict[str, Tensor],
    config: dict[str, Any],
    tokens: dict[str, Any],
) -> None:
    """All files of a checkpoint. tokens: content of tokenizer.json."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(network, directory / "model.safetensors")
    save_file(codec, directory / "audiovae.safetensors")
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    # LlamaTokenizer, the published models' class, puts its own steps in the place of tokenizer.json's: capitals, which
    # have no token, would be lost.
    tokens_config = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    for name, content in (
        ("config.json", config),
        ("tokenizer.json", tokens),
        ("tokenizer_config.json", tokens_config),
        ("special_tokens_map.json", special),
    ):
        (directory / name).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    for path in directory.iterdir():
        path.chmod(0o644)


def main() -> None:
    lm, codec_state, directory = map(Path, sys.argv[1:4])
    codec = Codec(CONFIG["audio_vae_config"])
    saved = torch.load(codec_state, map_location="cpu", weights_only=True)["codec"]
    codec.load_state_dict({name: v.float() if v.is_floating_point() else v for name, v in saved.items()})
    trained = network_tensors(torch.load(lm, map_location="cpu", weights_only=True)["model"])
    if trained.keys() != dict(Network(CONFIG).named_parameters()).keys():
        raise SystemExit(f"{lm} is of another network than models.embedded.voices.config describes")
    write(directory, trained, published(codec), CONFIG, tokenizer())


if __name__ == "__main__":
    main()
