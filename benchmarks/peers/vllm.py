"""vLLM in process with Qwen2-VL-2B and dummy weights: time to first token and decode steps. Needs CUDA."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.checkpoints.published import make

BATCHES = (1, 8, 32)
STEPS = 128
REPEATS = 15
TEXT_TOKENS = 128


def measure(folder: Path, tiny: bool) -> list[dict[str, Any]]:
    if tiny:
        raise SystemExit("vllm has no miniature here: it needs CUDA")
    from vllm import LLM, SamplingParams

    began = time.perf_counter()
    engine = LLM(
        str(make("qwen2_vl_2b", folder)),
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=4096,
        enable_prefix_caching=False,
        mm_processor_cache_gb=0,
        limit_mm_per_prompt={"image": 1},
    )
    start = time.perf_counter() - began
    rng = np.random.default_rng(0)

    def run(prompts: list[Any], tokens: int) -> float:
        settings = SamplingParams(max_tokens=tokens, min_tokens=tokens, temperature=0, ignore_eos=True)
        begin = time.perf_counter()
        engine.generate(prompts, settings, use_tqdm=False)
        return (time.perf_counter() - begin) * 1e3

    def picture() -> dict[str, Any]:
        image = Image.fromarray(rng.integers(0, 256, (448, 448, 3), dtype=np.uint8))
        text = "".join(rng.choice(list("abcdefghijklmnopqrstuvwxyz"), TEXT_TOKENS))
        return {"prompt": f"<|vision_start|><|image_pad|><|vision_end|>{text}", "multi_modal_data": {"image": image}}

    def ids() -> dict[str, Any]:
        return {"prompt_token_ids": rng.integers(0, 200, 384).tolist()}

    for _ in range(3):
        run([picture()], 1)
    rows = [_row("first token", [run([picture()], 1) for _ in range(REPEATS)])]
    for batch in BATCHES:
        run([ids() for _ in range(batch)], STEPS + 1)
        pairs = [
            (run([ids() for _ in range(batch)], 1), run([ids() for _ in range(batch)], STEPS + 1)) for _ in range(3)
        ]
        rows.append({"rows": batch, **_row("decode step", [(long - short) / STEPS for short, long in pairs])})
    return [{**row, "start_s": start} for row in rows]


def _row(what: str, times: list[float]) -> dict[str, Any]:
    p10, median, p90 = np.quantile(times, (0.1, 0.5, 0.9))
    return {"what": what, "ms": float(median), "p10_ms": float(p10), "p90_ms": float(p90)}
