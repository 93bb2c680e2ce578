"""Which configuration GEMMs of weights held as codes should take at 1 to 32 rows, on one H200 (or H100).

    PYTHONPATH=. python kern_bench.py [--seconds 140] [--out FILE]     on the GPU, from the repository root
    PYTHONPATH=. python kern_bench.py --apply FILE                     anywhere: writes FILE's entries into the table

Compiles in parallel without the GPU, then checks each variant against float32 and times it inside CUDA graphs over
rotated weights. Prints JSON lines; the last ones say what to change. `--dry` runs tiny shapes in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

BEGAN = time.monotonic()
DRY = "--dry" in sys.argv
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("TRITON_CACHE_DIR", f"codes_cache_{os.getpid()}")
sys.path.insert(0, os.getcwd())

import torch
import torch.nn.functional as F

from models.layers.kernels import gemm as G
from models.layers.kernels import moe
from models.layers.kernels.gemm_configs import default_split
from models.layers.kernels.gemm_types import Blocks, Tile
from models.layers.kernels.gemv import _u4_blocks, gemv
from models.layers.kernels.norms import rms_norm
from models.layers.kernels.tiled_gemm import split_gemm_add_norm, tiled_gemm
from models.layers.quantized import QuantizedWeight, Scheme

SCHEMES = {"u4": Scheme("u4", 128, torch.float16, zeros=True), "e4m3": Scheme("e4m3", 128, torch.bfloat16)}
SHAPES = {
    "gate_up": ("silu_mul", 18944, 3584),
    "down": ("add_norm", 3584, 18944),
    "qkv": ("plain", 4608, 3584),
    "o": ("add_norm", 3584, 3584),
}
LAYER = tuple(SHAPES)
SHAPES |= {"qkv_30b": ("plain", 5120, 2048), "o_30b": ("add_norm", 2048, 4096)}
SHAPES_OF = {"u4": LAYER, "e4m3": tuple(SHAPES)}
EXPERTS, ROTATED, CALLS = (128, 768, 2048), 160 << 20, 24
if DRY:
    SHAPES = {name: (kind, 128, 512) for name, (kind, n, _) in SHAPES.items()}
    EXPERTS, ROTATED, CALLS = (4, 128, 256), 0, 2
ROWS = (8, 1, 2, 4, 16, 32)
EPS = 1e-6
KIND = torch.float16 if DRY else torch.bfloat16
LIMIT = {"plain": 4e-3, "add_norm": 4e-3, "silu_mul": 6e-3}
MARGIN = 0.98
"""A table entry must be at least 2 % faster than the rule."""


def weight_rows(kind, outputs):
    return 2 * outputs if kind == "silu_mul" else outputs


# --- ways: ("tile", tile, split), ("gemv", blocks, normed) -----------------------------------------------------------


def splits_of(shape, tile, wanted):
    kind, outputs, inputs = SHAPES[shape]
    blocks, tiles = inputs // 128, max(1, weight_rows(kind, outputs) // tile.columns)
    found = []
    for programs in wanted:
        split = min(max(1, round(programs * 132 / tiles)), max(1, blocks // 2))
        split = -(-blocks // -(-blocks // split))
        if kind == "silu_mul":
            split = max(2, split)
        if split not in found:
            found.append(split)
    return found


def tiles_of(least):
    if least == 8:
        return [
            (Tile(8, 64, 128, 2, 4, swap=True), (3, 5, 8, 12)),
            (Tile(8, 64, 128, 2, 6, swap=True), (3, 5, 8)),
            (Tile(8, 128, 128, 4, 4, swap=True), (2, 4, 6)),
            (Tile(8, 128, 128, 4, 6, swap=True), (2, 4)),
            (Tile(8, 32, 128, 1, 4, swap=True), (4, 8, 14)),
            (Tile(8, 32, 128, 1, 6, swap=True), (6, 10)),
            (Tile(16, 64, 128, 4, 6, swap=True), (3, 5)),
        ]
    if least == 16:
        return [
            (Tile(16, 64, 128, 2, 4, swap=True), (3, 5, 8)),
            (Tile(16, 32, 128, 1, 4, swap=True), (5, 9)),
            (Tile(16, 128, 128, 4, 4, swap=True), (2, 4)),
            (Tile(16, 64, 128, 4, 6, swap=True), (3, 5)),
        ]
    return [(Tile(32, 64, 128, 2, 4, swap=True), (3, 5)), (Tile(32, 128, 128, 4, 4, swap=True), (2, 4))]


def least_of(rows):
    return 8 if rows <= 8 else 16 if rows <= 16 else 32


def rule(shape, rows):
    """What codes_rule.patch would take for every shape."""
    kind, outputs, inputs = SHAPES[shape]
    tile = Tile(8 if rows <= 8 else 16, 64, 128, warps=2, swap=True)
    blocks = inputs // 128  # default_split for 132 multiprocessors
    most = max(1, min(5 * 132 * 64 // weight_rows(kind, outputs), blocks // 3))
    split = -(-blocks // -(-blocks // most))
    return ("tile", tile, max(2, split) if kind == "silu_mul" else split)


def tile_ways(shape, rows):
    found = [rule(shape, rows)] if rows <= 16 else []
    found += [("tile", tile, split) for tile, wanted in tiles_of(least_of(rows)) for split in splits_of(shape, tile, wanted)]
    if SHAPES[shape][0] == "silu_mul":  # fused, today's loads
        found += [("tile", Tile(max(16, least_of(rows)), 64, 128, 4, 6, swap=True), 1)]
    return list(dict.fromkeys(way for way in found if weight_rows(*SHAPES[shape][:2]) % way[1].columns == 0))


def gemv_ways(scheme, shape):
    ways = [("gemv", None, True), ("gemv", None, False)]
    normed = SHAPES[shape][0] != "add_norm"
    if scheme == "u4":
        for outputs in (4, 8, 16):
            for depth in (128, 256, 512):
                ways.append(("gemv", Blocks(outputs, depth, depth // 128), normed))
    elif SHAPES[shape][0] == "plain":
        ways += [("gemv", blocks, False) for blocks in EXPERT_BLOCKS[1:]]
    return ways


def today(shape, x, weight):
    """The rule before: a GEMV of one row of `plain`, else a tile."""
    kind = SHAPES[shape][0]
    if x.shape[0] == 1 and kind == "plain":
        return ("gemv", None, False)
    tile = G.streamed_e4m3(kind, x, weight).tile
    split = default_split(weight.shape[0], weight.shape[1], tile.columns, codes=True) if kind == "add_norm" else 1
    return ("tile", tile, split)


def run(way, shape, x, weight, bias, residual, norm):
    kind = SHAPES[shape][0]
    if way[0] == "gemv":
        _, blocks, normed = way
        before = (norm[: x.shape[1]], EPS) if normed and kind != "add_norm" else None
        if kind == "add_norm":
            return gemv(x, weight, None, residual=residual, blocks=blocks)
        return gemv(x, weight, bias, norm=before, silu_mul=kind == "silu_mul", blocks=blocks)
    _, tile, split = way
    if kind == "add_norm":
        return split_gemm_add_norm(x, weight, None, residual, norm[: weight.shape[0]], EPS, split=split, tile=tile)
    return tiled_gemm(x, weight, bias, tile, "silu_mul" if kind == "silu_mul" else "", split=split)


def operands(shape, rows, device):
    kind, outputs, inputs = SHAPES[shape]
    x = torch.empty(rows, inputs, device=device, dtype=KIND)
    norm = torch.empty(max(inputs, outputs), device=device, dtype=KIND)
    bias = torch.empty(outputs, device=device, dtype=KIND) if kind == "plain" else None
    residual = torch.empty(rows, outputs, device=device, dtype=KIND)
    if device != "meta":
        for tensor in (x, norm, residual, *(() if bias is None else (bias,))):
            tensor.copy_(torch.randn(tensor.shape, device=device))
    return x, bias, residual, norm


# --- compiling, without the GPU --------------------------------------------------------------------------------------


def jobs():
    found = []
    for scheme in SCHEMES:
        for shape in SHAPES_OF[scheme]:
            for rows in (8, 16, 32):
                found += [(scheme, shape, rows, way) for way in ["today", *tile_ways(shape, rows)]]
            found += [(scheme, shape, 1, way) for way in ["today", *gemv_ways(scheme, shape)]]
    found += [("bfloat16", shape, rows, "rule") for shape in SHAPES for rows in (1, 2, 16, 32)]
    found += [("experts", part, 1, way) for part in ("gate_up", "down") for way in (*EXPERT_BLOCKS, 2, 4)]
    return found


EXPERT_BLOCKS = (
    None,
    *(Blocks(*one) for one in ((2, 256), (8, 256), (4, 512), (4, 128, 2), (8, 128, 2), (2, 128, 1), (4, 128, 1), (2, 512))),
    *(Blocks(*one) for one in ((1, 1024), (2, 1024), (1, 512, 2), (2, 512, 2), (4, 512, 8), (2, 1024, 8), (2, 256, 2), (1, 256, 2), (4, 1024, 8))),
)


def run_experts(part, way, rows, x, inside, spread, gate_up, down, index, ends):
    k = index.shape[0] // rows
    if isinstance(way, int):
        moe._WARPS = way
        made = moe.grouped_codes(spread if part == "gate_up" else inside, gate_up if part == "gate_up" else down, ends)
        moe._WARPS = 4
        return made
    if part == "gate_up":
        return gemv(x, gate_up, index=index, fan_out=k, silu_mul=True, blocks=way)
    return gemv(inside, down, index=index, blocks=way)


def run_16_bits(shape, x, w, bias, residual, norm):
    kind = SHAPES[shape][0]
    if kind == "add_norm":
        return G.gemm_add_norm(x, w, None, residual, norm[: w.shape[0]], EPS, deferrable=True)
    return G.gemm(x, w, bias, "silu_mul" if kind == "silu_mul" else "")


def ask(scheme, shape, rows, way):
    """Makes the launches of a job on the meta device."""
    if scheme == "experts":
        count, inner, hidden = EXPERTS
        with torch.device("meta"):
            gate_up = QuantizedWeight(count, 2 * inner, hidden, scheme=SCHEMES["e4m3"])
            down = QuantizedWeight(count, hidden, inner, scheme=SCHEMES["e4m3"])
            x, spread, inside = (torch.empty(n, w, dtype=KIND) for n, w in ((1, hidden), (8, hidden), (8, inner)))
            index, ends = torch.empty(8, dtype=torch.int64), torch.empty(count, dtype=torch.int32)
        return run_experts(shape, way, rows, x, inside, spread, gate_up, down, index, ends)
    kind, outputs, inputs = SHAPES[shape]
    x, bias, residual, norm = operands(shape, rows, "meta")
    if scheme == "bfloat16":
        weight = torch.empty(weight_rows(kind, outputs), inputs, dtype=KIND, device="meta")
        return run_16_bits(shape, x, weight, bias, residual, norm)
    with torch.device("meta"):
        weight = QuantizedWeight(weight_rows(kind, outputs), inputs, scheme=SCHEMES[scheme])
    return run(today(shape, x, weight) if way == "today" else way, shape, x, weight, bias, residual, norm)


def compile_some(some):
    from benchmarks.kernels.configurations import launches_go_to
    from benchmarks.kernels.offline import ARCHITECTURES, offline

    gpu = next(one for one in ARCHITECTURES if one.capability == (9, 0))
    faults, seen = [], set()
    with offline(gpu):
        for scheme, shape, rows, way in some:
            taken = []
            try:
                with launches_go_to(lambda kernel, args, options, taken=taken: taken.append((kernel, args, options))):
                    ask(scheme, shape, rows, way)
                for kernel, args, options in taken:
                    key = (kernel.fn.__name__, repr(sorted((k, str(v)) for k, v in options.items())))
                    if key not in seen:
                        seen.add(key)
                        kernel.run(*args, grid=(1,), warmup=True, **options)
            except Exception as error:  # noqa: BLE001
                faults.append(f"{scheme} {shape} {rows} {way}: {type(error).__name__}: {str(error)[:200]}")
    return faults


def compile_all():
    todo = jobs()
    workers = max(1, min(14, (os.cpu_count() or 2) - 1))
    parts = [todo[i :: 4 * workers] for i in range(4 * workers)]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(compile_some, part) for part in parts if part]):
            for fault in done.result():
                say(fault=fault)
    say(compiled=len(todo), seconds=round(time.monotonic() - BEGAN, 1), workers=workers)


# --- measuring -------------------------------------------------------------------------------------------------------


def say(**what):
    print(json.dumps(what), flush=True)


def left(seconds):
    return seconds - (time.monotonic() - BEGAN)


def replay_us(call, calls):
    """Median microseconds of a call in a graph of `calls`."""
    if DRY:
        began = time.perf_counter()
        call(0)
        return (time.perf_counter() - began) * 1e6
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(0)
        call(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(calls):
            call(index)
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(9):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls)
    return statistics.median(times)


def random_weight(scheme, outputs, inputs, device, *leading):
    with torch.device(device):
        weight = QuantizedWeight(*leading, outputs, inputs, scheme=SCHEMES[scheme])
    codes = weight.values.view(torch.uint8)
    codes.random_(0, 256)
    if scheme == "e4m3":
        codes[codes & 0x7F == 0x7F] = 1
    size = {"u4": 5, "e4m3": 100}[scheme]
    weight.scale.copy_((torch.rand(weight.scale.shape, device=device) + 0.3) * inputs**-0.5 / size)
    if weight.zeros is not None:
        weight.zeros.random_(0, 16)
    return weight


def copies_of(weight, device):
    size = sum(part.numel() * part.element_size() for part in weight.parameters())
    count = max(2, math.ceil(ROTATED / size))
    copies = [weight]
    for _ in range(count - 1):
        with torch.device(device):
            one = QuantizedWeight(*weight.shape, scheme=weight.scheme)
        for to, source in zip(one.parameters(), weight.parameters(), strict=True):
            to.data.copy_(source.data)
        copies.append(one)
    return copies


def error_of(made, way, shape, x, wide, bias, residual, norm):
    kind = SHAPES[shape][0]
    normed = way[0] == "gemv" and way[2] and kind != "add_norm"
    given = x.float()
    if normed:
        given = (given * torch.rsqrt(given.square().mean(-1, keepdim=True) + EPS)).to(KIND) * norm[: x.shape[1]]
        given = given.float()
    product = given @ wide.T
    if bias is not None:
        product = product + bias.float()
    if kind == "silu_mul":
        gate, up = product.to(KIND).float().chunk(2, -1)
        product = F.silu(gate).to(KIND).float() * up
    if kind == "add_norm":
        product = product + residual.float()
        made = made if isinstance(made, torch.Tensor) else made[1]
    return float((made.float() - product).norm() / product.norm())


def name_of(way):
    if way[0] == "gemv":
        return f"gemv {tuple(way[1]) if way[1] else 'default'}{' norm' if way[2] else ''}"
    return f"{way[1]} split {way[2]}"


def exact(way, shape, x, weight, bias, residual, norm):
    """Same bits again, in a graph, and for a row whatever its neighbours are."""

    def first(made):
        return made if isinstance(made, torch.Tensor) else made[1]

    eager = first(run(way, shape, x, weight, bias, residual, norm)).clone()
    same = bool(torch.equal(eager, first(run(way, shape, x, weight, bias, residual, norm))))
    if not DRY:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = first(run(way, shape, x, weight, bias, residual, norm))
        graph.replay()
        torch.cuda.synchronize()
        same &= bool(torch.equal(eager, out))
    if x.shape[0] > 1:
        few = x.shape[0] // 2
        part = first(run(way, shape, x[:few].contiguous(), weight, bias, residual[:few].contiguous(), norm))
        same &= bool(torch.equal(eager[:few], part))
    return same


def measure(scheme, shape, device, seconds, results):
    kind, outputs, inputs = SHAPES[shape]
    weight = random_weight(scheme, weight_rows(kind, outputs), inputs, device)
    copies = copies_of(weight, device)
    wide = weight.dequantised(torch.float32)
    calls = max(CALLS, len(copies))
    best_at_8 = None
    for rows in ROWS:
        if left(seconds) < 8:
            say(skipped=f"{scheme} {shape} {rows}")
            continue
        x, bias, residual, norm = operands(shape, rows, device)
        base = today(shape, x, weight)
        ways = tile_ways(shape, rows)
        if rows in (2, 4) and best_at_8:
            ways = [*best_at_8[:5], rule(shape, rows)]
        ways = [base, *[way for way in ways if way != base]]
        if rows == 1:
            ways += [way for way in gemv_ways(scheme, shape) if way != base]
        if DRY:
            ways = [*ways[:4], *[way for way in ways if way[0] == "gemv"][:4]]
        times = {}
        for way in dict.fromkeys(ways):
            try:
                made = run(way, shape, x, weight, bias, residual, norm)
                error = error_of(made, way, shape, x, wide, bias, residual, norm)
                if not error < LIMIT[kind]:
                    say(scheme=scheme, shape=shape, rows=rows, way=name_of(way), wrong=error)
                    continue
                us = replay_us(
                    lambda i, way=way: run(way, shape, x, copies[i % len(copies)], bias, residual, norm), calls
                )
            except Exception as failure:  # noqa: BLE001
                say(scheme=scheme, shape=shape, rows=rows, way=name_of(way), failed=f"{type(failure).__name__}: {failure}"[:200])
                continue
            times[way] = us
            say(scheme=scheme, shape=shape, rows=rows, way=name_of(way), us=round(us, 2), error=round(error, 5), today=way == base)
        tiles = sorted((way for way in times if way[0] == "tile"), key=times.get)
        if rows == 8:
            best_at_8 = tiles
        if tiles:
            same = exact(tiles[0], shape, x, weight, bias, residual, norm)
            say(scheme=scheme, shape=shape, rows=rows, best=name_of(tiles[0]), us=round(times[tiles[0]], 2), exact=same)
            if not same:
                times = {way: us for way, us in times.items() if way == base or way != tiles[0]}
        results[scheme, shape, rows] = (base, times)
    del copies, wide, weight


def sixteen_bits(shape, device, results):
    kind, outputs, inputs = SHAPES[shape]
    weight = torch.randn(weight_rows(kind, outputs), inputs, device=device).to(KIND)
    copies = [weight, *(weight.clone() for _ in range(max(1, math.ceil(ROTATED / (2 * weight.numel())) - 1)))]
    for rows in ROWS:
        x, bias, residual, norm = operands(shape, rows, device)

        def call(i, x=x, bias=bias, residual=residual, norm=norm):
            return run_16_bits(shape, x, copies[i % len(copies)], bias, residual, norm)

        us = replay_us(call, max(CALLS, len(copies)))
        results["bfloat16", shape, rows] = us
        say(scheme="bfloat16", shape=shape, rows=rows, us=round(us, 2))


def experts(device, seconds):
    """30B-A3B in block FP8: GEMVs of chosen experts against grouped tiles, 4 warps (today) and 2."""
    count, inner, hidden = EXPERTS
    gate_up = random_weight("e4m3", 2 * inner, hidden, device, count)
    down = random_weight("e4m3", hidden, inner, device, count)
    for rows in (1, 4, 8, 32):
        if left(seconds) < 6:
            return
        chosen = [torch.randperm(count, device=device)[: min(8, count)].repeat(rows) for _ in range(16)]
        if rows > 1:
            chosen = [torch.stack([torch.randperm(count, device=device)[: min(8, count)] for _ in range(rows)]).flatten() for _ in range(16)]
        k = min(8, count)
        x = torch.randn(rows, hidden, device=device).to(KIND)
        inside = torch.randn(rows * k, inner, device=device).to(KIND)
        ends = [moe.expert_places(one.view(rows, k), count)[1] for one in chosen]
        spread = torch.randn(rows * k, hidden, device=device).to(KIND)
        for part in ("gate_up", "down"):
            times = {}
            for way in (*((EXPERT_BLOCKS[:2] if DRY else EXPERT_BLOCKS) if rows <= 4 else ()), 4, 2):
                name = f"grouped, {way} warps (gate_up: no silu)" if isinstance(way, int) else f"gemv {tuple(way) if way else 'today'}"
                try:
                    us = replay_us(
                        lambda i, part=part, way=way: run_experts(
                            part, way, rows, x, inside, spread, gate_up, down, chosen[i % 16], ends[i % 16]
                        ),
                        CALLS,
                    )
                except Exception as failure:  # noqa: BLE001
                    say(experts=part, rows=rows, way=name, failed=f"{failure}"[:160])
                    continue
                say(experts=part, rows=rows, way=name, us=round(us, 2))
                times[way] = us
            gemvs = [way for way in times if not isinstance(way, int)]
            best = min(gemvs, key=times.get, default=None)
            if rows == 1 and best is not None and times[best] < MARGIN * times[None]:
                kind, outputs, inputs = ("silu_mul", inner, hidden) if part == "gate_up" else ("plain", hidden, inner)
                BLOCKS.append({"kind": kind, "inputs": inputs, "outputs": outputs, "codes": "e4m3", "blocks": list(best)})


# --- deciding --------------------------------------------------------------------------------------------------------


def best_tile(times):
    tiles = [way for way in times if way[0] == "tile"]
    return min(tiles, key=times.get) if tiles else None


def best_gemv(times, normed):
    found = [way for way in times if way[0] == "gemv" and way[2] == normed]
    return min(found, key=times.get) if found else None


def decide_rows(results, scheme, shape, rows):
    """The tile that should replace the rule at 2 rows and more, None to keep it."""
    if (scheme, shape, rows) not in results:
        return None
    base, times = results[scheme, shape, rows]
    way = best_tile(times)
    if way is None or base not in times or way == base or times[way] > MARGIN * times[base]:
        return None
    return way


def decide_vector(results, scheme, norm_us):
    """At one row: tiles of either layer of both pairs (add_norm, then what reads its norm)."""
    chosen, total = {}, 0.0
    pairs = (("o", "gate_up"), ("down", "qkv"), *((("o_30b", "qkv_30b"),) if scheme == "e4m3" else ()))
    for adds, reads in pairs:
        if (scheme, adds, 1) not in results or (scheme, reads, 1) not in results:
            continue
        (base_a, add), (base_r, read) = results[scheme, adds, 1], results[scheme, reads, 1]
        tile_a, tile_r = best_tile(add), best_tile(read)
        gemv_a = min((way for way in add if way[0] == "gemv"), key=add.get, default=None)
        gemv_n, gemv_p = best_gemv(read, True), best_gemv(read, False)
        options = []
        if scheme == "u4":
            options.append((add[gemv_a] + read[gemv_n], {adds: gemv_a, reads: gemv_n}))
            options.append((add[tile_a] + read[tile_r], {adds: tile_a, reads: tile_r}))
            options.append((add[tile_a] + read[gemv_p], {adds: tile_a, reads: gemv_p}))
            options.append((add[gemv_a] + norm_us + read[tile_r], {adds: gemv_a, reads: tile_r}))
        else:
            for a in {base_a, tile_a}:
                for r in {base_r, tile_r, *([gemv_p] if gemv_p else [])} if SHAPES[reads][0] == "plain" else {base_r, tile_r}:
                    options.append((add[a] + read[r], {n: w for n, w, b in ((adds, a, base_a), (reads, r, base_r)) if w != b}))
        cost, found = min(options, key=lambda option: option[0])
        say(scheme=scheme, pair=f"{adds} -> {reads}", options=[(round(c, 2), {n: name_of(w) for n, w in f.items()}) for c, f in options])
        total += cost if adds in LAYER else 0.0
        chosen |= found
    return chosen, total


BLOCKS = []
"""Entries of the table for GEMVs."""


def keep_blocks(scheme, shape, way):
    if way[1] is not None:
        kind, outputs, inputs = SHAPES[shape]
        gated = "silu_mul" if kind == "silu_mul" else "plain"
        BLOCKS.append({"kind": gated, "inputs": inputs, "outputs": outputs, "codes": scheme, "blocks": list(way[1])})


def entries(results, norm_us):
    spans = {1: (1, 1), 2: (2, 2), 4: (3, 4), 8: (5, 8), 16: (9, 16), 32: (17, 32)}
    found = []
    for scheme in SCHEMES:
        try:
            vector, total = decide_vector(results, scheme, norm_us)
        except (KeyError, TypeError) as missing:
            say(undecided=f"{scheme} at 1 row: {missing!r}")
            vector, total = {}, None
        say(scheme=scheme, rows=1, layer_us=total and round(total, 2))
        for rows in ROWS:
            if rows == 1 or any((scheme, shape, rows) not in results for shape in LAYER):
                continue
            before = sum(results[scheme, shape, rows][1].get(results[scheme, shape, rows][0], math.nan) for shape in LAYER)
            after = sum(min(results[scheme, shape, rows][1].values()) for shape in LAYER)
            plain = sum(results.get(("bfloat16", shape, rows), math.nan) for shape in LAYER)
            by_rule = sum(results[scheme, shape, rows][1].get(rule(shape, rows), math.nan) for shape in LAYER)
            say(
                scheme=scheme,
                rows=rows,
                layer_us_today=round(before, 2),
                layer_us_rule=round(by_rule, 2),
                layer_us_best=round(after, 2),
                layer_us_bfloat16=round(plain, 2),
            )
        for shape in SHAPES_OF[scheme]:
            kind, outputs, inputs = SHAPES[shape]
            choices = []
            for rows in sorted(ROWS):
                way = vector.get(shape) if rows == 1 else decide_rows(results, scheme, shape, rows)
                if way is None:
                    continue
                if way[0] == "gemv":
                    keep_blocks(scheme, shape, way)
                    continue
                _, tile, split = way
                least, most = spans[rows]
                variant = {"tile": {"rows": tile.rows, "columns": tile.columns, "depth": tile.depth, "warps": tile.warps, "stages": tile.stages, "swap": tile.swap, "tma": tile.tma}, "split": split, "deferred": False, "eight_bit": False}
                if choices and choices[-1]["variant"] == variant and choices[-1]["most"] == least - 1:
                    choices[-1]["most"] = most
                else:
                    choices.append({"least": least, "most": most, "variant": variant})
            if choices:
                found.append({"kind": kind, "inputs": inputs, "outputs": outputs, "e4m3": False, "codes": scheme, "choices": choices})
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=140.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--apply", type=Path)
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    if options.apply:
        from benchmarks.kernels.choose import write

        write(**json.loads(options.apply.read_text()))
        return
    device = "cpu" if DRY else "cuda"
    torch.manual_seed(0)
    if not DRY:
        compile_all()
        torch.cuda.init()
        say(device=torch.cuda.get_device_name(), torch=torch.__version__)
    results = {}
    for scheme in SCHEMES:
        for shape in SHAPES_OF[scheme]:
            measure(scheme, shape, device, options.seconds, results)
    for shape in SHAPES:
        if left(options.seconds) > 5:
            sixteen_bits(shape, device, results)
    x, norm = torch.randn(1, 3584, device=device).to(KIND), torch.randn(3584, device=device).to(KIND)
    norm_us = replay_us(lambda i: rms_norm(x, norm, EPS), CALLS)
    say(rms_norm_us=round(norm_us, 2))
    made = {"codes": entries(results, norm_us), "codes_blocks": BLOCKS}
    experts(device, options.seconds + 15)
    say(table=made)
    if options.out:
        options.out.write_text(json.dumps(made))
    say(seconds=round(time.monotonic() - BEGAN, 1))


if __name__ == "__main__":
    main()
