"""Makes shapes.png, the picture of the README's first question."""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageDraw


def main() -> None:
    scale = 4  # drawn large and reduced: smooth edges
    picture = Image.new("RGB", (224 * scale, 168 * scale), "#f4efe6")
    draw = ImageDraw.Draw(picture)
    draw.ellipse([n * scale for n in (20, 28, 96, 104)], fill="#d1495b")
    draw.rectangle([n * scale for n in (84, 68, 156, 140)], fill="#30638e")
    draw.polygon([(n * scale) for n in (176, 36, 212, 116, 140, 116)], fill="#edae49")
    picture.resize((224, 168), Image.Resampling.LANCZOS).save(Path(__file__).with_name("shapes.png"), optimize=True)


if __name__ == "__main__":
    main()
