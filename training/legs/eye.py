"""One leg: health, training, gates. python3 leg.py OUT SECONDS LR [RESUME]"""
import argparse, inspect, json, os, shutil, sys, time
from functools import partial
from pathlib import Path
import multiprocessing
import torch
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("REPRISE_WORLD_FONTS", str(ROOT / "fonts"))
import training.vision.network as network_module
if torch.cuda.is_available():
    from torch.nn.attention.varlen import varlen_attn
    names = inspect.signature(varlen_attn).parameters
    if "window_size" not in names:
        def old(q, k, v, cu_q, cu_k, max_q, max_k, window_size=(-1, -1)):
            return varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, window_size[1] == 0)
        network_module.varlen_attn = old
        print("varlen_attn:", list(names), flush=True)
from training import loop
from training.vision import gates
from training.vision.blocks import Drawn, Feed, answers, on_device, packed
from training.vision.checkpoint import load
from training.vision.conversations import Encoder
from training.vision.network import Shape
from training.vision.train import Trainer

PUBLISHED = ROOT / "models/embedded/qwen2_vl"


def made(name, number):
    """Examples of a gate as they were before cyan and magenta."""
    from training.vision import palette, questions, scenes
    for module in (palette, questions, scenes):
        module.COLOR_NAMES = tuple(n for n in palette.COLORS if n not in palette.SPELLED)
    return list(gates.examples(name, number))


@torch.no_grad()
def health(network, encoder, dtype, device, pool):
    """Mean loss of answers to old questions, and by gate."""
    names = [n for n in gates.NAMES if n not in gates.NOT_PROMISED and n != "strange"]
    names = os.environ["ONLY"].split() if "ONLY" in os.environ else names
    found_all = [e for examples in pool.imap(partial(made, number=6 if device.type == "cuda" else 3), names) for e in examples]
    total, count = {}, {}
    for found, tasks in on_device(encoder, found_all, device):
        batch = packed(found)
        logits = network.logits(network.model(batch, network.visual(batch, dtype)))
        each = F.cross_entropy(logits, found["labels"].long().flatten(), reduction="none").tolist()
        for turn, loss in zip(found["turns"].flatten().tolist(), each, strict=True):
            if turn >= 0:
                total[tasks[turn]] = total.get(tasks[turn], 0.0) + loss
                count[tasks[turn]] = count.get(tasks[turn], 0) + 1
    by = {t: round(total[t] / count[t], 3) for t in sorted(total, key=lambda t: -total[t] / count[t])}
    print("highest losses:", dict(list(by.items())[:12]), flush=True)
    return sum(total.values()) / sum(count.values())


class Leg(Trainer):
    outside = None

    def kept(self):
        super().kept()
        for name in ("average.safetensors", "vision.jsonl"):
            if (self.options.out / name).exists():
                shutil.copyfile(self.options.out / name, self.outside / (name + ".part"))
                (self.outside / (name + ".part")).rename(self.outside / name)


def main():
    began = time.monotonic()
    out, seconds, rate = Path(sys.argv[1]).resolve(), float(sys.argv[2]), float(sys.argv[3])
    resume = Path(sys.argv[4]) if len(sys.argv) > 4 else PUBLISHED / "model.safetensors"
    out.mkdir(parents=True, exist_ok=True)
    resume = resume / "average.safetensors" if resume.is_dir() else resume
    cuda = torch.cuda.is_available()
    number = int(os.environ.get("GATE_QUESTIONS", 40))
    options = argparse.Namespace(
        data=PUBLISHED, out=Path(f"eye_state_{os.getpid()}").resolve(), seconds=seconds, rate=rate, keep=60.0,
        seed=int(os.environ.get("SEED", time.time())) % 100_000, compile=cuda, decay=0.5 * seconds,
        blocks=6 if cuda else 1, pool=384 if cuda else 4, workers=int(os.environ.get("WORKERS", 14 if cuda else 0)),
        auxiliary=0.0, resume=None,
    )
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = torch.backends.cudnn.allow_tf32 = True
    torch._dynamo.config.recompile_limit = 64
    on = loop.device()
    if cuda:
        torch.cuda.set_stream(torch.cuda.Stream())
    encoder = Encoder(PUBLISHED)
    # Drawing begins at once; the GPU compiles meanwhile.
    feed = Feed(Drawn(PUBLISHED, options.seed), on, options.workers, options.pool, options.seed)
    processes = 14 if cuda else 1
    dtype = torch.bfloat16 if cuda else torch.float32
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        loss = health(load(resume, on), encoder, dtype, on, pool)
    record = {"resume": str(resume), "old questions' loss before the first step": round(loss, 4), "health": loss <= 0.1,
              "seconds to here": round(time.monotonic() - began, 1)}
    print(json.dumps(record), flush=True)
    (out / "health.json").write_text(json.dumps(record) + "\n")
    if loss > 0.1 and not os.environ.get("SICK"):
        sys.exit("health: the loss is too high; SICK=1 to go on")
    trainer = Leg(Shape(vocab_size=-(-encoder.vocab_size // 64) * 64), options, feed)
    trainer.outside = out
    trainer.take_published(resume, PUBLISHED) if resume.parent == PUBLISHED else take(trainer, resume)
    loop.run(trainer, options)
    print("trained", trainer.steps, "steps,", round(time.monotonic() - began, 1), "s", flush=True)
    weights = out / "average.safetensors"
    torch.cuda.empty_cache() if cuda else None
    from PIL import Image
    from training.vision import outside
    # This machine has no matplotlib: its pictures were drawn before.
    for kind in ("plot", "sign"):
        files = sorted((ROOT / "outside").glob(f"{kind}_*"))
        setattr(outside, kind + "s", lambda files=files: (Image.open(file).convert("RGB") for file in files))
    if "QUICK" in os.environ:
        outside.DATA["known"] = dict(list(outside.DATA["known"].items())[:1])
        some = list(outside.others())[::40]
        outside.others = lambda: iter(some)
    found = None if "NO_OUTSIDE" in os.environ else outside.measure(load(weights, on), encoder)
    (out / "outside.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    print("outside", {n: v for n, v in found.items() if n != "wrong"}, round(time.monotonic() - began, 1), "s", flush=True)
    command = [sys.executable, "-m", "training.vision.gates", "--number", str(number), "--directory", str(PUBLISHED),
               "--weights", str(weights), "--json", str(out / "gates.json"), "--processes", str(processes)]
    command += ["--only", *os.environ["ONLY"].split()] if "ONLY" in os.environ else []
    with open(out / "gates.txt", "w") as text:
        code = __import__("subprocess").run(command, cwd=ROOT, stdout=text, stderr=text, timeout=300).returncode
    print("gates exit", code, round(time.monotonic() - began, 1), "s", flush=True)
    if (out / "gates.json").exists():
        scores = json.loads((out / "gates.json").read_text())
        print({n: scores[n] for n in ("failed", "known_things_refused", "yes")}, flush=True)
    os._exit(0)


def take(trainer, path):
    """take_published of a file that lies apart from its tokenizer."""
    from safetensors.torch import load_file
    own = dict(trainer.network.named_parameters())
    with torch.no_grad():
        for name, value in load_file(path).items():
            own[name].copy_(value)
    trainer.optimiser.average.restart()


if __name__ == "__main__":
    main()
