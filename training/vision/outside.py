"""Measures models/embedded/qwen2_vl on what its generator never drew or worded: drawings, plots of matplotlib, signs of
a font, pictures of installed packages and clips of other things, which have to be refused, and questions written by
hand about drawings of what it knows. outside.json has the drawings and the questions.

    python -m training.vision.outside --json outside.json

An answer to a question is right where it has each of the expected words ("|" between words of which one is enough).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch.nn import functional as F

from training.loop import device, hashes
from training.vision.blocks import LONGEST, Packer, packed
from training.vision.conversations import ASKED, END, Example, decode
from training.vision.network import PUBLISHED, Network, load
from training.vision.pictures import MAX_PIXELS, MIN_PIXELS, Canvas, Picture, finished
from training.vision.questions import MANY, ONLY, Turn
from training.vision.scenes import VIDEO_MIN_PIXELS

DATA = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
GATES = {"right": 0.92, "refused": 0.02, "honest of a picture": 0.97}
GATES |= {f"honest of a {kind}": 0.95 for kind in ("drawing", "plot", "sign", "clip")}
"""Least shares; of what is refused the largest. Of all pictures at most 3 % get an invention."""


def drawn(scene: dict[str, Any], across: float = 0.0) -> Image.Image:
    """A drawing of outside.json, calls of ImageDraw, moved by `across` pixels."""
    image = Image.new("RGB", tuple(scene["size"]), scene["ground"])
    for method, spots, how in scene["draw"]:
        moved = [value + across * (nth % 2 == 0) for nth, value in enumerate(spots)]
        getattr(ImageDraw.Draw(image), method)(moved, **how)
    return image


def plots() -> Iterator[Image.Image]:
    """By matplotlib, in its own colours and print."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    x, draws = np.linspace(0, 10, 80), np.random.default_rng(5)
    field = np.sin(x[:, None]) * np.cos(x / 2)
    kinds = [
        ("plot", x, np.sin(x)),
        ("plot", x, np.exp(-x / 3), x, x / 10),
        ("scatter", *draws.normal(size=(2, 40))),
        ("hist", draws.normal(size=400), 15),
        ("bar", list("ABCDE"), draws.uniform(1, 9, 5)),
        ("barh", ["one", "two", "three"], draws.uniform(1, 9, 3)),
        ("boxplot", draws.normal(size=(50, 4))),
        ("imshow", draws.uniform(size=(8, 10))),
        ("contour", field),
        ("contourf", field),
        ("step", x[:20], draws.uniform(size=20)),
        ("stem", draws.uniform(size=15)),
        ("fill_between", x, np.abs(np.sin(x)) * x),
        ("stackplot", x[:9], draws.uniform(1, 3, (3, 9))),
        ("quiver", *draws.normal(size=(2, 8, 8))),
        ("streamplot", x, x, field + 1, field.T),
        ("errorbar", range(8), draws.uniform(size=8), 0.2),
        ("violinplot", list(draws.normal(size=(4, 60)))),
        ("set_title", r"$\int_0^1 \frac{x^2}{1+x}\,dx$"),
        ("triplot", *draws.uniform(size=(2, 25))),
        ("semilogy", x, np.exp(x)),
    ]
    for nth, style in enumerate(("default", "ggplot", "dark_background", "bmh")):
        for name, *data in kinds:
            with pyplot.style.context(style):
                figure, axes = pyplot.subplots(figsize=(4, 3) if nth % 2 else (5, 4), dpi=100)
                getattr(axes, name)(*data)
                file = BytesIO()
                figure.savefig(file)
                pyplot.close(figure)
            yield Image.open(file).convert("RGB")


def signs() -> Iterator[Image.Image]:
    """Pictograms of the font that matplotlib has, and its pictures."""
    import matplotlib

    data, random = Path(matplotlib.get_data_path()), Random(3)
    for code in "☀☁☂☃☎☕☘☠☢☮☯☹☺♈♋♔♘♚♛♞♠♣♥♨♪♫♻⚀⚄⚐⚑⚒⚓⚔⚖⚗⚙⚛⚠⚡⛀✁✂✆✈✉✌✍✎✒❀❁❄❤":
        face = ImageFont.truetype(data / "fonts/ttf/DejaVuSans.ttf", random.randint(120, 260))
        paper = random.choice(("white", "white", "#f4f0e0", "#202430"))
        image = Image.new("RGB", (320, 320), paper)
        ink = "white" if paper == "#202430" else random.choice(("black", "red", "navy", "darkgreen"))
        ImageDraw.Draw(image).text((160, 160), code, fill=ink, font=face, anchor="mm")
        yield image
    for path in (*sorted((data / "images").glob("*_large.png")), data / "sample_data/grace_hopper.jpg"):
        icon = Image.open(path).convert("RGBA").resize((240, 240))
        ground = Image.new("RGBA", (300, 300), "white")
        ground.alpha_composite(icon, (30, 30))
        yield ground.convert("RGB")


def clips() -> Iterator[list[Image.Image]]:
    """Of 2 to 40 frames: drawings that slide or become others, Conway's life, bodies that bounce, print that grows."""
    scenes, draws = list(DATA["other"].values()), np.random.default_rng(9)
    text = "The ship leaves the\nharbour at half past\nseven in the morning\nand comes back late"
    for nth, number in enumerate((2, 3, 4, 6, 8, 8, 10, 12, 16, 16, 20, 24, 30, 40)):
        scene, other = (drawn(scenes[(5 * nth + i) % len(scenes)]).resize((360, 300)) for i in (0, 3))
        cells, ways = draws.uniform(size=(18, 32)) < 0.3, draws.uniform(-1, 1, (5, 4))
        found: list[list[Image.Image]] = [[], [], [], [], []]
        for part in np.arange(number) / number:
            found[0].append(drawn(scenes[(5 * nth) % len(scenes)], 90 * (part - 0.5)))
            found[1].append(Image.blend(scene, other, part))
            found[2].append(Image.fromarray(np.kron(cells, np.full((10, 10), 255)).astype(np.uint8)).convert("RGB"))
            near = sum(np.roll(cells, (a, b), (0, 1)).astype(int) for a in (-1, 0, 1) for b in (-1, 0, 1)) - cells
            cells = (near == 3) | (cells & (near == 2))
            found[3].append(Image.new("RGB", (360, 280), "#102030"))
            for begin in 3 * ways[:, :2] + 4 * ways[:, 2:] * part:
                x, y = (180, 140) + np.arcsin(np.sin(begin)) * (88, 66)
                ImageDraw.Draw(found[3][-1]).ellipse((x - 16, y - 16, x + 16, y + 16), fill="orange")
            found[4].append(Image.new("RGB", (360, 280), "white"))
            said = text[: 20 + int(part * len(text))]
            ImageDraw.Draw(found[4][-1]).text((20, 40), said, fill="black", font_size=30)
        yield from found


def picture(images: Sequence[Image.Image]) -> Picture:
    bounds = (MIN_PIXELS, MAX_PIXELS) if len(images) == 1 else (VIDEO_MIN_PIXELS, round(1.05 * VIDEO_MIN_PIXELS))
    if 1 < len(images) < 16:
        bounds = VIDEO_MIN_PIXELS, MAX_PIXELS
    found = finished(Canvas(Random(0), 28, 28), list(images), bounds)
    found.motion = ("clip",) if len(images) > 1 else None
    return found


def said(network: Network, shown: Picture, question: str, most: int = 64) -> str:
    """What greedy decoding answers, at most `most` tokens of it."""
    on, packer = next(network.parameters()).device, Packer()
    packer.put(Example([shown], [[Turn("", question, "")]], [ASKED]))
    batch = packed({name: value[None].to(on) for name, value in packer.joined().items()})
    vision = network.visual(batch)
    # The empty answer's end and the newline behind it go.
    ids, source, positions = batch.ids[:-2], batch.source[:-2], batch.positions[:, :-2]
    answer: list[int] = []
    while len(answer) < most:
        now = replace(
            batch,
            ids=ids,
            source=source,
            positions=positions,
            text_cu=torch.tensor([0, len(ids)], dtype=torch.int32, device=on),
            selected=torch.tensor([len(ids) - 1], device=on),
            longest=max(LONGEST, len(ids)),
        )
        token = network.logits(network.model(now, vision)).argmax()
        if token == END:
            break
        answer.append(int(token))
        ids, source = torch.cat((ids, token[None])), F.pad(source, (0, 1), value=-1)
        positions = torch.cat((positions, positions[:, -1:] + 1), dim=1)
    return decode(answer)


def is_right(answer: str, expected: str) -> bool:
    answer = answer.lower()
    return all(any(word in answer for word in words.split("|")) for words in expected.split(","))


def others() -> Iterator[tuple[str, list[Image.Image]]]:
    """What is to be refused, by kind: one image, or the frames of a clip."""
    yield from (("drawing", [drawn(scene)]) for scene in DATA["other"].values())
    yield from (("plot", [image]) for image in plots())
    yield from (("sign", [image]) for image in signs())
    yield from (("clip", frames) for frames in clips())


@torch.no_grad()
def measure(network: Network) -> dict[str, Any]:
    """Shares of right and refused answers to what is known and of honest ones to what is not, and what went wrong."""
    found: dict[str, list[bool]] = defaultdict(list)
    wrong: list[str] = []
    for name, scene in DATA["known"].items():
        shown = picture([drawn(scene)])
        for question, expected in scene["asks"]:
            answer = said(network, shown, question)
            found["right"].append(is_right(answer, expected))
            found["refused"].append(answer.startswith(ONLY[:11]))
            if not found["right"][-1]:
                wrong.append(f"{name} | {question} | {answer}")
    for nth, (kind, images) in enumerate(others()):
        shown, question = picture(images), DATA["asked"][nth % (4 if len(images) == 1 else 5)]
        answer = said(network, shown, question, 24)
        honest = ONLY.startswith(answer) or answer == MANY
        for name in (kind, "clip" if kind == "clip" else "picture"):
            found[f"honest of a {name}"].append(honest)
        if not honest:
            wrong.append(f"{kind} {nth}, {len(images)} frames | {question} | {answer}")
    shares = {name: round(sum(values) / len(values), 4) for name, values in found.items()}
    asked = {name: len(values) for name, values in found.items()}
    return {"asked": asked, **shares, "failed": failures(shares), "wrong": wrong}


def failures(shares: Mapping[str, float]) -> list[str]:
    """The gates that do not hold."""
    return [name for name, gate in GATES.items() if (shares[name] > gate if name == "refused" else shares[name] < gate)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, default=PUBLISHED / "model.safetensors")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = measure(load(options.weights, device()))
    report = json.dumps(
        {"sha256": hashes(options.weights)[options.weights.name], **found}, indent=1, ensure_ascii=False
    )
    if options.json:
        options.json.write_text(report + "\n", encoding="utf-8")
    print(report)
    sys.exit(bool(found["failed"]))
