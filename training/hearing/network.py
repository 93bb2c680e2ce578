"""The network of models.qwen3_asr under its published names, for batches of items of as many seconds each.

Its tokens are every byte, and the 344 commonest words of the texts; other words are spelled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from models.layers.precision import without_tf32
from models.qwen3_asr.config import CHUNK_FRAMES, CHUNK_ROWS, HOP, MEL_BANDS, N_FFT, SAMPLE_RATE
from models.qwen3_asr.encoder import BANDS, NORM_EPS, sinusoid
from models.qwen3_asr.log_mel import mel_filters, windowed_dft
from training.transformer import Block, Parts, RMSNorm, layer_norm, linear, rotary_of
from training.voice.flite import PHONES

PUBLISHED = Path(__file__).parents[2] / "models/embedded/qwen3_asr"
_CONFIG = json.loads((PUBLISHED / "config.json").read_text(encoding="utf-8"))["thinker_config"]
AUDIO: dict[str, Any] = _CONFIG["audio_config"]
TEXT: dict[str, Any] = _CONFIG["text_config"]
_TOKENIZER = Tokenizer.from_file(str(PUBLISHED / "tokenizer.json"))


def ids_of(text: str) -> list[int]:
    return list(_TOKENIZER.encode(text).ids)


SUFFIX = ids_of("<|audio_end|><|im_end|>\n<|im_start|>assistant\n")
"""What stands behind the audio's rows; then SPEECH, the text and END, or NOTHING."""
NOTHING = ids_of("language None<asr_text><|im_end|>")
SPEECH, END = ids_of("language English<asr_text>"), NOTHING[-1]


def prefix_of(context: str = "") -> list[int]:
    """What stands before the audio's rows."""
    return ids_of(f"<|im_start|>system\n{context}<|im_end|>\n<|im_start|>user\n<|audio_start|>")


def text_of(ids: list[int]) -> str:
    """Of an answer up to its end: "language English<asr_text>..."."""
    return str(_TOKENIZER.decode(ids[: ids.index(END)] if END in ids else ids, skip_special_tokens=True))


PHONES_PER_ROW = 4
_WARPS = np.linspace(0.82, 1.2, 20)
_TELEPHONE_HERTZ = 3800.0
WARPS = 2 * (1 + len(_WARPS))
"""Filter banks: as published first, then with stretched frequencies, then each without what a telephone loses."""


class Features(nn.Module):
    """The log-mel spectrogram of models.qwen3_asr.log_mel of many items, through a filter bank for each."""

    dft: Tensor
    banks: Tensor

    def __init__(self) -> None:
        super().__init__()
        bins, columns = np.arange(N_FFT // 2 + 1), mel_filters().T
        # What was at bin / warp is heard at bin.
        warped = [[np.interp(bins * warp, bins, column, right=0.0) for column in columns] for warp in (1.0, *_WARPS)]
        banks = np.array(warped).transpose(0, 2, 1)
        low = (bins * SAMPLE_RATE / N_FFT < _TELEPHONE_HERTZ)[:, None]
        self.register_buffer("dft", torch.from_numpy(windowed_dft()), persistent=False)
        self.register_buffer("banks", torch.from_numpy(np.concatenate((banks, banks * low))).float(), persistent=False)

    def forward(self, wave: Tensor, frames: Tensor, bank: Tensor, tilt: Tensor | float = 1.0) -> Tensor:
        """wave [N, HOP * frames + N_FFT], reflected at both ends of each item; frames, bank [N]; tilt [N, 1, 128] are
        factors of the power -> [N, chunks, 128, 100], zeros behind each item's end."""
        spectrum = wave.unfold(1, N_FFT, HOP)[:, : (wave.shape[1] - N_FFT) // HOP]
        with without_tf32():
            real, imaginary = (spectrum @ self.dft).chunk(2, dim=2)
            bands = (real.square() + imaginary.square()) @ self.banks[bank]
        levels = (bands * tilt).clamp(min=1e-10).log10()
        inside = (torch.arange(levels.shape[1], device=wave.device) < frames[:, None])[..., None]
        loudest = levels.masked_fill(~inside, -torch.inf).amax((1, 2), keepdim=True)
        mel = (torch.maximum(levels, loudest - 8.0) + 4.0) / 4.0 * inside
        return mel.unflatten(1, (-1, CHUNK_FRAMES)).transpose(2, 3)


class TowerBlock(nn.Module):
    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        names = ("q_proj", "k_proj", "v_proj", "out_proj")
        self.self_attn = Parts(**{name: nn.Linear(width, width) for name in names})
        self.self_attn_layer_norm, self.final_layer_norm = (nn.LayerNorm(width, eps=NORM_EPS) for _ in range(2))
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """x [windows, rows, width], mask [windows, 1, 1, rows]."""
        y, attention = layer_norm(x, self.self_attn_layer_norm), self.self_attn
        layers = attention.q_proj, attention.k_proj, attention.v_proj
        q, k, v = (linear(y, layer).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in layers)
        scores = (q @ k.mT * q.shape[-1] ** -0.5).float().masked_fill(~mask, -torch.inf)
        x = x + linear((scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2).flatten(2), attention.out_proj)
        return x + linear(F.gelu(linear(layer_norm(x, self.final_layer_norm), self.fc1)), self.fc2)


class Tower(nn.Module):
    sinusoid: Tensor

    def __init__(self) -> None:
        super().__init__()
        width, channels = AUDIO["d_model"], AUDIO["downsample_hidden_size"]
        self.conv2d1 = nn.Conv2d(1, channels, 3, stride=2, padding=1)
        self.conv2d2, self.conv2d3 = (nn.Conv2d(channels, channels, 3, stride=2, padding=1) for _ in range(2))
        self.conv_out = nn.Linear(channels * BANDS, width, bias=False)
        self.register_buffer("sinusoid", torch.from_numpy(sinusoid(CHUNK_ROWS, width)), persistent=False)
        sizes = width, AUDIO["encoder_ffn_dim"], AUDIO["encoder_attention_heads"]
        self.layers = nn.ModuleList(TowerBlock(*sizes) for _ in range(AUDIO["encoder_layers"]))
        self.ln_post = nn.LayerNorm(width, eps=NORM_EPS)
        self.proj1, self.proj2 = nn.Linear(width, width), nn.Linear(width, AUDIO["output_dim"])

    def forward(self, mel: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """mel [N, chunks, 128, 100], rows [N] of each item -> embeds and hidden rows, [N, 13 * chunks, width]."""
        count, chunks = mel.shape[:2]
        x = mel.reshape(-1, 1, MEL_BANDS, CHUNK_FRAMES)
        for conv in (self.conv2d1, self.conv2d2, self.conv2d3):
            bias = None if conv.bias is None else conv.bias.to(x.dtype)
            x = F.gelu(F.conv2d(x, conv.weight.to(x.dtype), bias, stride=2, padding=1))
        x = linear(x.permute(0, 3, 1, 2).flatten(2), self.conv_out) + self.sinusoid.to(x.dtype)
        window = CHUNK_ROWS * min(chunks, AUDIO["n_window_infer"] // CHUNK_FRAMES)
        place = torch.arange(CHUNK_ROWS * chunks, device=mel.device)
        # A window without a row of its own attends to its first, so that nothing is divided by zero.
        mask = (place < rows[:, None]) | (place % window == 0)
        x, mask = x.reshape(-1, window, x.shape[-1]), mask.view(-1, 1, 1, window)
        for block in self.layers:
            x = block(x, mask)
        x = layer_norm(x, self.ln_post).view(count, -1, x.shape[-1])
        return linear(F.gelu(linear(x, self.proj1)), self.proj2), x


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width, heads, self.pairs = TEXT["hidden_size"], TEXT["num_attention_heads"], TEXT["head_dim"] // 2
        self.embed_tokens = nn.Embedding(TEXT["vocab_size"], width)
        nn.init.normal_(self.embed_tokens.weight, std=0.05)
        sizes = width, TEXT["intermediate_size"], heads, TEXT["num_key_value_heads"], 2 * self.pairs
        self.layers = nn.ModuleList(Block(*sizes, qk_norm=True) for _ in range(TEXT["num_hidden_layers"]))
        self.norm = RMSNorm(width)

    def forward(self, ids: Tensor, embeds: Tensor, begin: Tensor, rows: Tensor) -> Tensor:
        """ids [N, T]; rows [N] of embeds stand at begin [N] -> logits [N, T, vocabulary]."""
        place = torch.arange(ids.shape[1], device=ids.device)
        at = place - begin[:, None]
        heard = ((at >= 0) & (at < rows[:, None]))[..., None]
        at = at.clamp(0, embeds.shape[1] - 1)[..., None].expand(-1, -1, embeds.shape[2])
        # A product, as the gradient of a look-up waits for the host.
        table = self.embed_tokens.weight.to(embeds.dtype)
        said = (ids[..., None] == torch.arange(len(table), device=ids.device)).to(table.dtype) @ table
        x = torch.where(heard, embeds.gather(1, at), said)
        rotary = rotary_of(place[:, None], self.pairs, TEXT["rope_theta"])
        for block in self.layers:
            x, _ = block(x, rotary, _causal)
        return F.linear(self.norm(x), table)


def _causal(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
    q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2), None


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.thinker = Parts(audio_tower=Tower(), model=Text())
        self.auxiliary = nn.Linear(AUDIO["d_model"], PHONES_PER_ROW * len(PHONES))
