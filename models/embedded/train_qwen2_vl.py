"""Trains models/embedded/qwen2_vl on one GPU, in legs that go on where the last one ended.

    REPRISE_WORLD_FONTS=build/fonts python -m models.embedded.train_qwen2_vl --seconds 540 --state state.pt --out out

Processes draw pictures and conversations without end; the GPU takes new blocks as they come and fills its batches up
with blocks of a pool that it has seen before.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from models.embedded.gates_qwen2_vl import NAMES, examples
from models.embedded.vision_training import augment
from models.embedded.vision_training import blocks as B
from models.embedded.vision_training.batches import Answer, Held, answers, fields, on_device, packed
from models.embedded.vision_training.feed import Feed
from models.embedded.vision_training.network import Network, Shape, choose_attention
from models.embedded.vision_training.optimiser import Optimiser
from models.embedded.world.conversations import Encoder

_WARMUP_STEPS = 200
_EMA = 0.998
_STEPS_BEFORE_CAPTURE = 12
_PROFILED_STEP = 8
_WORDS = "model.embed_tokens.weight"


class Trainer:
    def __init__(self, shape: Shape, device: torch.device, *, compiles: bool = False, captures: bool = False) -> None:
        torch.manual_seed(1)
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.network = Network(shape).to(device)
        self.average = {name: p.detach().clone() for name, p in self.network.named_parameters()}
        self.optimiser = Optimiser(self.network)
        self.steps, self.captures = 0, captures
        self.graph: torch.cuda.CUDAGraph | None = None
        self.result = torch.zeros(4, device=device)
        if compiles:
            for block in (*self.network.visual.blocks, *self.network.model.layers):
                block.compile(dynamic=False)
            self.network.auxiliary.compile(dynamic=False)
            self.network.visual.merger.compile(dynamic=False)
            for holder, name in (
                (self.network.model, "words"),
                (self.network.visual, "embed"),
                (self, "_answers"),
                (self, "_shifted"),
            ):
                setattr(holder, name, torch.compile(getattr(holder, name), dynamic=False))

    def _shifted(self, *fields: Tensor) -> Tensor:
        return augment.shifted(*fields)

    def _answers(self, hidden: Tensor, weight: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        logits = F.linear(hidden, weight.to(hidden.dtype)).float()
        return (F.cross_entropy(logits, labels, reduction="none") * weights).sum() / weights.sum()

    def _loss(self, found: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        number = len(found["ids"])
        shifts, light, moved = augment.draw(number, self.device)
        noise = torch.randn(found["frames"].shape, dtype=torch.float16, device=self.device)
        names = ("frames", "frame_starts", "frame_grids", "frame_pictures")
        batch = packed({**found, "frames": self._shifted(*(found[name] for name in names), shifts, light, noise)})
        vision = self.network.visual(batch, self.dtype)
        hidden = self.network.model(batch, vision)
        labels, weights = found["labels"].long().flatten(), found["weights"].float().flatten()
        answers = self._answers(hidden, self.network.model.embed_tokens.weight, labels, weights)
        still = (~moved).float()[:, None].expand(number, B.PATCHES // 4).flatten()
        shapes, letters = self.network.auxiliary(vision, found["cells"].long().flatten(0, 1), still)
        return answers, shapes, letters

    def step(self, rows: Tensor, rate: float, auxiliary: float) -> Tensor:
        """One step on blocks [n, BLOCK_BYTES], the same tensor at every call: losses and the gradient's norm.

        After some steps it is captured as a graph and replayed: it is many small kernels."""
        self.optimiser.rate.fill_(rate)
        self.steps += 1
        if self.graph is not None:
            self.graph.replay()
            return self.result
        if self.steps == _STEPS_BEFORE_CAPTURE and self.captures:
            self._capture(rows, auxiliary)
        return self._step(rows, auxiliary)

    def _capture(self, rows: Tensor, auxiliary: float) -> None:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            # Another thread may be busy with held-out examples.
            stream = torch.cuda.current_stream()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self.result = self._step(rows, auxiliary)
        except Exception as error:  # whatever it is, training goes on without a graph
            print(f"not captured: {error!r}", flush=True)
            torch.cuda.synchronize()
            return
        self.graph = graph
        print("captured", flush=True)

    def _step(self, rows: Tensor, auxiliary: float) -> Tensor:
        losses = torch.stack(self._loss(fields(rows)))
        total = losses[0] + auxiliary * (losses[1] + losses[2])
        self.network.zero_grad(set_to_none=True)
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0, foreach=True)
        self.optimiser.step()
        torch._foreach_lerp_(list(self.average.values()), [p.detach() for p in self.network.parameters()], 1 - _EMA)
        return torch.cat((losses.detach(), norm[None]))

    def accuracy(self, held: Sequence[Held]) -> list[Answer]:
        """Of the held-out turns, by the averaged weights."""
        own = {name: p.detach().clone() for name, p in self.network.named_parameters()}
        self._take(self.average)
        with torch.compiler.set_stance("force_eager"):
            found = [
                answer
                for fields_of, tasks in held
                for answer in answers(
                    self.network, ({n: f.to(self.device) for n, f in fields_of.items()}, tasks), self.dtype
                )
            ]
        self._take(own)
        return found

    def _take(self, weights: Mapping[str, Tensor]) -> None:
        for name, parameter in self.network.named_parameters():
            parameter.data.copy_(weights[name])

    def save(self, directory: Path, steps: int, seconds: float) -> None:
        """state.pt, to go on from, and average.safetensors, what is measured. The optimiser begins anew in the next
        leg: its memory is a few hundred steps long."""
        state = {name: shortened(p.detach().cpu()) for name, p in self.network.named_parameters()}
        torch.save({"network": state, "steps": steps, "seconds": seconds}, directory / "state.pt")
        kept = {n: p.bfloat16().cpu().contiguous() for n, p in self.average.items() if not n.startswith("auxiliary")}
        save_file(kept, directory / "average.safetensors", metadata={"format": "pt"})

    def take_published(self, path: Path, tokenizer: Path) -> None:
        """The weights of a published checkpoint. What its tokenizer.json does not know begins anew, and so do the heads
        of what export drops."""
        found = load_file(path)
        own = dict(self.network.named_parameters())
        words = own[_WORDS].detach().clone()
        before, now = (vocabulary_of(directory) for directory in (path.parent, tokenizer))
        kept = [(index, before[token]) for token, index in now.items() if token in before]
        to, of = (torch.tensor(rows, device=words.device) for rows in zip(*kept, strict=True))
        words[to] = found[_WORDS].to(words)[of]
        self._take({**own, **found, _WORDS: words})
        for name, parameter in self.network.named_parameters():
            self.average[name].copy_(parameter.data)

    def load(self, path: Path) -> tuple[int, float]:
        state = torch.load(path, map_location="cpu", weights_only=True)
        for name, parameter in self.network.named_parameters():
            parameter.data.copy_(lengthened(state["network"][name], parameter.shape))
            self.average[name].copy_(parameter.data)
        return state["steps"], state["seconds"]


def vocabulary_of(directory: Path) -> dict[str, int]:
    return Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab()


def shortened(values: Tensor) -> Tensor:
    """float32 as the upper three of its bytes, uint8 [n, 3]."""
    rounded = values.contiguous().view(torch.int32) + 128
    return rounded.view(-1).view(torch.uint8).view(-1, 4)[:, 1:].contiguous()


def lengthened(values: Tensor, shape: torch.Size) -> Tensor:
    return torch.cat((torch.zeros_like(values[:, :1]), values), dim=1).view(torch.float32).view(shape)


def rate_at(step: int, seconds: float, options: argparse.Namespace) -> float:
    """Warm, then constant, then down to a fiftieth over the last `decay` seconds of this leg."""
    warm = min(1.0, (step + 1) / _WARMUP_STEPS)
    left = (options.seconds - seconds) / options.decay if options.decay else 1.0
    return options.rate * warm * max(0.02, min(1.0, left))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--decay", type=float, default=0.0, help="seconds at the end in which the rate falls")
    parser.add_argument("--easy", type=float, default=0.0, help="seconds at the begin with easy examples")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--blocks", type=int, default=12, help="a batch")
    parser.add_argument("--pool", type=int, default=768)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cores", default="", help="for the workers: a comma-separated list")
    parser.add_argument(
        "--measure", type=float, default=60, help="seconds between measurements; both files are written"
    )
    parser.add_argument("--held-out", type=int, default=100)
    parser.add_argument("--auxiliary", type=float, default=0.3)
    parser.add_argument("--tokenizer", type=Path, required=True)
    begin = parser.add_mutually_exclusive_group()
    begin.add_argument("--state", type=Path, help="go on from this state.pt of an earlier leg, if there is one")
    begin.add_argument("--weights", type=Path, help="begin with the weights of this model.safetensors")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--profile", action="store_true", help="one step, on a GPU: print where its time goes")
    parser.add_argument("--plain", action="store_true", help="neither compile nor capture")
    options = parser.parse_args()
    train(options)


def train(options: argparse.Namespace) -> None:
    began = time.monotonic()
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 32
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        # Graphs are captured on a stream of their own, and gradients remember the stream they were first made on.
        torch.cuda.set_stream(torch.cuda.Stream())
    cores = [int(core) for core in options.cores.split(",") if core]
    feed = Feed(options.tokenizer, device, options.workers, cores, options.seed, options.pool)
    encoder = Encoder(options.tokenizer)
    held: list[Held] = []

    def make() -> None:
        for name in NAMES:
            held.extend(on_device(encoder, list(examples(name, options.held_out)), torch.device("cpu")))

    maker = threading.Thread(target=make)
    maker.start()
    shape = Shape(vocab_size=-(-encoder.vocab_size // 64) * 64)
    attention = choose_attention(device) if device.type == "cuda" else "by segments"
    optimised = device.type == "cuda" and not options.plain
    trainer = Trainer(shape, device, compiles=optimised, captures=optimised)
    step, before = trainer.load(options.state) if options.state and options.state.exists() else (0, 0.0)
    if options.weights:
        trainer.take_published(options.weights, options.tokenizer)
    log = Log(options.out)
    parameters = sum(p.numel() for n, p in trainer.network.named_parameters() if "auxiliary" not in n)
    log.write(
        event="start",
        attention=attention,
        parameters=parameters,
        shape=asdict(shape),
        step=step,
        block_bytes=B.BLOCK_BYTES,
    )
    sums, since, measured_at, first_step = torch.zeros(4, device=device), 0, began, step
    seconds, reported, new = 0.0, began, 0
    rows = torch.zeros(options.blocks, B.BLOCK_BYTES, dtype=torch.uint8, device=device)
    while seconds < options.seconds:
        feed.level.value = int(before + seconds >= options.easy)
        new += feed.gather(options.blocks, rows)
        rate = rate_at(step - first_step, seconds, options)
        if step - first_step == _PROFILED_STEP and options.profile:
            print(profiled(partial(trainer.step, rows, rate, options.auxiliary)), flush=True)
        sums += trainer.step(rows, rate, options.auxiliary)
        step, since = step + 1, since + 1
        now = time.monotonic()
        if step - first_step in (1, 2, 5, 20) or now - reported > 10:
            means = (sums / since).tolist()
            log.write(
                step=step,
                seconds=round(now - began, 1),
                answers=means[0],
                shapes=means[1],
                letters=means[2],
                norm=means[3],
                rate=rate,
                steps_a_second=round(since / (time.monotonic() - reported), 2),
                new_blocks=feed.count,
                new_share=new / (since * options.blocks),
                conversations=feed.sequences,
                block_ms=(1e3 * feed.spent / max(1, feed.count)).round().tolist(),
                memory=round(torch.cuda.max_memory_allocated() / 2**30, 1) if device.type == "cuda" else 0,
            )
            sums.zero_()
            since, new, reported = 0, 0, time.monotonic()
        if now - measured_at > options.measure and step - first_step > 20 and not maker.is_alive():
            log.accuracy(trainer, held, step)
            trainer.save(options.out, step, before + seconds)
            measured_at = time.monotonic()
        if device.type == "cuda" and step % 4 == 0:
            torch.cuda.synchronize()
        seconds = time.monotonic() - began
    feed.stop()
    trainer.save(options.out, step, before + seconds)
    maker.join()
    log.accuracy(trainer, held, step)
    log.write(event="end", step=step, seconds=round(time.monotonic() - began, 1))


def profiled(run: Callable[[], object]) -> str:
    """Runs once and says which kernels took the time."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        run()
        torch.cuda.synchronize()
    return found.key_averages().table(sort_by="self_cuda_time_total", row_limit=24, max_name_column_width=70)


class Log:
    def __init__(self, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.file = (out / "log.jsonl").open("a", encoding="utf-8")

    def write(self, **entry: object) -> None:
        rounded = {name: round(value, 5) if isinstance(value, float) else value for name, value in entry.items()}
        text = json.dumps(rounded)
        print(text, flush=True)
        self.file.write(text + "\n")
        self.file.flush()

    def accuracy(self, trainer: Trainer, held: Sequence[Held], step: int) -> None:
        right: dict[str, list[bool]] = defaultdict(list)
        for answer in trainer.accuracy(held):
            right[answer.task].append(answer.right)
        shares = {task: round(sum(values) / len(values), 3) for task, values in sorted(right.items())}
        self.write(step=step, right=shares, of={task: len(values) for task, values in sorted(right.items())})


if __name__ == "__main__":
    main()
