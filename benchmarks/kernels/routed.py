"""Whole stacks with the tables that the single GEMMs suggest, as they run inside a step: LocDiT (11 positions, two rows
a stream, 4 of 11 rows kept at the end), and the language models over a paged cache, in decode and in a prefill of one
prompt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.kernels.choose import Routes, candidates, read
from benchmarks.kernels.gemms import STACKS
from benchmarks.kernels.timing import Case, Run
from models.layers.attention import rotary_paged_decode_attention, varlen_attention
from models.layers.block import Block, BlockConfig, run_blocks
from models.layers.fused import rotary_dense_attention
from models.layers.kernels import gemm_configs
from models.layers.norms import RMSNorm
from models.layers.rotary import rotate_and_cache
from models.voxcpm2.stack import Stack

EPS = 1e-5
CONTEXT = 400
PREFILL = " prefill"
CONFIGS: dict[str, tuple[BlockConfig, int]] = {
    "locdit": (BlockConfig(1024, 4096, 16, 2, 128, EPS), 12),
    "voxcpm2 lm": (BlockConfig(2048, 6144, 16, 2, 128, EPS), 28),
    "qwen2b": (BlockConfig(1536, 8960, 12, 2, 128, EPS, qkv_bias=True), 28),
}


def _ready(module: nn.Module) -> None:
    module.to(torch.bfloat16).requires_grad_(False)
    for part in module.modules():
        if isinstance(part, RMSNorm):
            part.weight.fill_(1.0)


def _locdit(rows: int) -> Callable[[], Tensor]:
    with torch.device("cuda"):
        stack = Stack(*CONFIGS["locdit"])
    _ready(stack)
    x = torch.randn(rows // 11, 11, 1024, device="cuda", dtype=torch.bfloat16)
    cos, sin = torch.randn(2, 11, 64, device="cuda")

    def attend(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        return rotary_dense_attention(q, k, v, cos, sin, first_query=0 if q.shape[1] == 11 else 7)

    return lambda: stack(x, attend, slice(7, 11))


def _blocks(name: str) -> tuple[list[Block], RMSNorm]:
    config, layers = CONFIGS[name]
    with torch.device("cuda"):
        blocks, norm = [Block(config) for _ in range(layers)], RMSNorm(config.hidden_size, EPS)
    for module in (*blocks, norm):
        _ready(module)
    return blocks, norm


def _prefill(name: str, rows: int) -> Callable[[], Tensor]:
    config, _ = CONFIGS[name]
    blocks, norm = _blocks(name)
    x = torch.randn(rows, config.hidden_size, device="cuda", dtype=torch.bfloat16)
    keys, values = torch.randn(2, rows, config.num_kv_heads, 128, device="cuda", dtype=torch.bfloat16)
    slots = torch.arange(rows, device="cuda")
    cos, sin = torch.randn(2, rows, 64, device="cuda")
    ends = torch.tensor([0, rows], device="cuda", dtype=torch.int32)

    def attend(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        q, k = rotate_and_cache(q, k, v, (cos, sin), keys, values, slots)
        return varlen_attention(q, k, v, ends, ends, causal=True)

    return lambda: run_blocks(blocks, x, norm, attend)


def _decode(name: str, rows: int) -> Callable[[], Tensor]:
    config, _ = CONFIGS[name]
    blocks, norm = _blocks(name)
    page, pages = 16, CONTEXT // 16 + 1
    x = torch.randn(rows, config.hidden_size, device="cuda", dtype=torch.bfloat16)
    shape = ((rows * pages + 1) * page, config.num_kv_heads, 128)
    keys, values = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    tables = (torch.randperm(rows * pages, device="cuda").int() + 1).view(rows, pages)
    lengths = torch.full((rows,), CONTEXT, device="cuda", dtype=torch.int32)
    slots = tables[:, (CONTEXT - 1) // page].long() * page + (CONTEXT - 1) % page
    cos, sin = torch.randn(2, rows, 64, device="cuda")

    def attend(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        return rotary_paged_decode_attention(q, k, v, (cos, sin), keys, values, slots, tables, lengths, page)

    return lambda: run_blocks(blocks, x, norm, attend)


def _make(name: str, rows: int, table: Routes) -> Run:
    model = name.removesuffix(PREFILL)
    forward = _locdit(rows) if name == "locdit" else (_decode if model == name else _prefill)(model, rows)

    def run(index: int) -> object:
        with gemm_configs.using(table):
            return forward()

    return run


def cases(folder: Path) -> list[Case]:
    times, found = read(folder, "gemms"), []
    for stack in STACKS:
        if stack.name.removesuffix(PREFILL) in CONFIGS:
            for rows in stack.rows:
                for name, table in candidates(times, stack).items():
                    make = lambda a=(stack.name, rows, table): _make(*a)  # noqa: E731
                    found.append(Case("routed stack", f"{stack.name}, {rows} rows", name, make, calls=3))
    return found
