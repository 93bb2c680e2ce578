"""VoxCPM2 at full size with random weights: decode step, tail and codec by bucket, replayed, eager, and their roofline.

python -m benchmarks.speech_steps [BUCKET ...]
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.checkpoints.published import make
from benchmarks.measure.command_line import command_line
from benchmarks.measure.record import table, write
from benchmarks.measure.timing import milliseconds, spread
from benchmarks.steps.full_size import captured, load, show
from benchmarks.steps.speech import CONTEXT, MODEL, captured_decode
from models.protocol import SpeechModel
from service.engine.speech.runner import CodecStream, emitted
from service.engine.start import engine_stream
from service.graphs.pool import GraphPool

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FLOW = 20
"""Number of steps in a row, each of which takes step_ms; the codec of the last one is waited for."""
FLOOR_MS = {1: 2.54, 2: 2.54, 4: 2.55, 8: 2.56, 16: 2.6, 32: 5.14, 64: 9.06, 128: 16.96, 256: 32.8}
"""By streams: 7.6 GB at 3.0 TB/s, from 32 streams on 87.8 GFLOP a stream at 700 TFLOP/s; the codec not counted. Beyond
64 the language models' weights and cache at that speed, and 84.3 GFLOP a stream."""


def measure(model: SpeechModel, bucket: int, pool: GraphPool, device: torch.device) -> dict[str, Any]:
    decode, plan, state = captured_decode(model, bucket, pool)
    steps = model.solver_steps[0]
    tail = captured(MODEL, "tail", model.tail(steps, state), [plan.required], pool)
    codec = CodecStream(device)
    vae = captured(MODEL, "vae", model.vae_step(state), [plan.required], pool, codec.capture_stream(plan.required))
    patches = np.random.default_rng(0).standard_normal((bucket, *model.patch_shape), dtype=np.float32)
    vae_plan = replace(plan, tensors={"results": [torch.from_numpy(emitted(patches)).to(device)]})

    def steps_in_flow() -> None:
        """Each step's codec in parallel with the next step, as in the engine."""
        for _ in range(FLOW):
            decode.run(plan)
            with codec.after_steps():
                vae.run(vae_plan)
                done = torch.cuda.current_stream(device).record_event()
        torch.cuda.current_stream(device).wait_event(done)

    row: dict[str, Any] = {"streams": bucket, "solver_steps": steps, "context": CONTEXT}
    for name, call in (
        ("decode", lambda: decode.run(plan)),
        ("tail", lambda: tail.run(plan)),
        ("vae", lambda: vae.run(vae_plan)),
        ("step", steps_in_flow),
    ):
        state["length"].fill_(CONTEXT)
        flow = name == "step"
        taken = spread(name, milliseconds(call, repeats=5 if flow else 30))
        row |= {key: ms / (FLOW if flow else 1) for key, ms in taken.items()}
    state["length"].fill_(CONTEXT)
    row["decode_eager_ms"] = milliseconds(lambda: decode.run(plan, eager="disabled"), repeats=5, warm_up=1)["median"]
    row["vae_eager_ms"] = milliseconds(lambda: vae.run(vae_plan, eager="disabled"), repeats=5, warm_up=1)["median"]
    row["floor_ms"] = FLOOR_MS.get(bucket, float("nan"))
    row["rtf"] = row["step_ms"] / 160
    row["audio_s_per_s"] = bucket * 160 / row["step_ms"]
    row |= {"graph_bytes": pool.graph_bytes, "static_bytes": pool.static_bytes}
    return show(row)


@torch.inference_mode()
def main() -> None:
    parser = command_line("benchmarks.speech_steps", __doc__)
    parser.add_argument("buckets", nargs="*", type=int, default=list(BUCKETS), metavar="BUCKET")
    arguments = parser.parse_args()
    device = torch.device("cuda", 0)
    with tempfile.TemporaryDirectory() as folder, engine_stream(device):
        directory = make(MODEL, Path(folder))
        model: SpeechModel = load(directory, device)
        pool = GraphPool(device, 24 << 30)
        rows = [measure(model, bucket, pool, device) for bucket in reversed(arguments.buckets)]
    write("speech_steps", rows[::-1])
    print(table(rows[::-1]))


if __name__ == "__main__":
    main()
