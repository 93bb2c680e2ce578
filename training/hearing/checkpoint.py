"""The files of the embedded recogniser in the published layout of Qwen3-ASR; `published` has all but its weights.

Its tokens are every byte, and the 344 commonest words of the texts; other words are spelled."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

PUBLISHED = Path(__file__).parent / "published"
_CONFIG = json.loads((PUBLISHED / "config.json").read_text(encoding="utf-8"))["thinker_config"]
AUDIO: dict[str, Any] = _CONFIG["audio_config"]
TEXT: dict[str, Any] = _CONFIG["text_config"]


class Vocabulary:
    """Ids of texts, which hold no special tokens, and of the published prompt's parts."""

    def __init__(self) -> None:
        self._tokenizer = Tokenizer.from_file(str(PUBLISHED / "tokenizer.json"))
        self.suffix = self.ids("<|audio_end|><|im_end|>\n<|im_start|>assistant\n")
        self.nothing = self.ids("language None<asr_text><|im_end|>")
        self.speech = self.ids("language English<asr_text>")
        self.end = self.nothing[-1]

    def ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def prefix(self, context: str = "") -> list[int]:
        """What stands before the audio's rows."""
        return self.ids(f"<|im_start|>system\n{context}<|im_end|>\n<|im_start|>user\n<|audio_start|>")

    def text(self, ids: list[int]) -> str:
        """Of an answer up to its end: "language English<asr_text>..."."""
        ids = ids[: ids.index(self.end)] if self.end in ids else ids
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def publish(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes all files; heads that only help to train are left out."""
    shutil.copytree(PUBLISHED, directory, dirs_exist_ok=True)
    kept = {
        f"thinker.{name}": tensor.to(torch.bfloat16).contiguous()
        for name, tensor in sorted(tensors.items())
        if not name.startswith("auxiliary.")
    }
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
