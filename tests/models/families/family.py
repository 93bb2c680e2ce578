"""The chat families' golden directories through the production loaders; what differs between families is data here."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from models.checkpoints.registry import family_of, resolve
from models.interfaces.capturable import Bucket, Plan
from models.interfaces.media import MediaItem, Prompt, media_digest
from models.qwen_vl.pictures import VideoLimits
from tests.models.minicpmv import golden as minicpmv
from tests.models.qwen3_asr import golden as qwen3_asr
from tests.support.chat_golden import golden_prompt, golden_video, golden_video_limits
from tests.support.encoder_replay import bytes_of_nan, random_item
from tests.support.golden import GOLDEN, golden_parts, inputs, numbered, prompts, with_fewest, with_most

CPU, META = torch.device("cpu"), torch.device("meta")
NAN = float("nan")
UNREAD = 70 * 70 - 1
"""A row of MiniCPM-V's table of positions that no picture of the tests reads."""
QWEN_BUCKETS: tuple[Bucket, ...] = (
    {"patches": 16, "sequences": 3, "max_seqlen": 16},
    {"patches": 60, "sequences": 4, "max_seqlen": 60},
    {"patches": 240, "sequences": 24, "max_seqlen": 64},
)


SETTINGS = frozenset({"downsample_mode", "max_slice_nums", "use_image_id"})
"""Fields of processor_config.json with which some golden prompts differ from the file."""

qwen_item = partial(random_item, block=28)


@dataclass(frozen=True, eq=False)
class Family:
    """One folder of tests/golden.

    buckets: of captured encoders, ascending. random: an item of (rows, columns) blocks of 2 x 2 patches, each up to
    `side`, so many frames of them, from a seed. full: shapes of items that fill a bucket. chunk: tokens of a prefill
    that cuts pictures. largest, smaller: buckets for GPUs. engine: settings of the engine.
    """

    name: str
    chunk: int = 17
    embeds_tolerance: float = 2e-5
    buckets: tuple[Bucket, ...] = QWEN_BUCKETS
    random: Callable[[int, int, int, int], MediaItem] = qwen_item
    side: int = 4
    full: tuple[tuple[tuple[int, int, int, int], ...], ...] = ()
    engine: Mapping[str, Any] = field(default_factory=dict)
    largest: Bucket = field(default_factory=lambda: {"patches": 512, "sequences": 16, "max_seqlen": 512})
    smaller: Bucket = field(default_factory=lambda: {"patches": 256, "sequences": 8, "max_seqlen": 256})
    video_limits: VideoLimits | None = None

    @property
    def directory(self) -> Path:
        return GOLDEN / self.name

    @property
    def version(self) -> str | None:
        """Of MiniCPM-V with a resampler."""
        version = self.name.removeprefix("minicpmv_").replace("_", ".")
        return version if version in minicpmv.VERSIONS else None

    @property
    def merges_windows(self) -> bool:
        """MiniCPM-V 4.6 and 4.7."""
        return "minicpmv" in self.name and self.version is None

    @property
    def qwen(self) -> bool:
        """Sees, by the tower of the Qwen-VL families."""
        return self.name.startswith("qwen") and not self.hears

    @property
    def hears(self) -> bool:
        return self.name == "qwen3_asr"

    @property
    def inputs(self) -> dict[str, Any]:
        return inputs(self.directory)

    @property
    def tokens(self) -> int:
        return int(self.inputs["max_new_tokens"])

    @property
    def prompts(self) -> tuple[str, ...]:
        """Those of the checkpoint's own settings."""
        golden = self.inputs["prompts"]
        return tuple(name for name in prompts(self.directory) if not golden[name].keys() & SETTINGS or self.version)

    @property
    def pictured(self) -> list[str]:
        """Prompts with pictures or videos."""
        return [name for name in self.prompts if golden_parts(self.directory, name)]

    @property
    def single(self) -> str:
        return with_fewest(self.directory)

    @property
    def multi(self) -> str:
        return with_most(self.directory)

    @property
    def video_prompt(self) -> str:
        return with_most(self.directory, "video")

    @property
    def expected(self) -> dict[str, Tensor]:
        return _expected(self.name)

    def of(self, prompt: str, value: str) -> Tensor:
        return self.expected[f"prompt.{prompt}.{value}"]

    def golden_tokens(self, prompt: str) -> list[int]:
        return self.of(prompt, "generated_ids").tolist()

    @property
    def processor(self) -> Any:
        return _processor(self)

    @property
    def model(self) -> Any:
        return self.on("cpu")

    def on(self, device: str, dtype: torch.dtype = torch.float32) -> Any:
        return _model(self, device, dtype)

    def loaded(self, directory: Path | None = None, load_format: str = "published") -> Any:
        """A model of its own, of a directory that a test has changed."""
        return self.fresh("cpu", torch.float32, directory, load_format)

    def fresh(
        self, device: str, dtype: torch.dtype, directory: Path | None = None, load_format: str = "published"
    ) -> Any:
        directory = directory or self.directory
        return resolve(family_of(directory).model)(directory, torch.device(device), dtype, load_format)

    def processor_of(self, directory: Path) -> Any:
        processor = resolve(family_of(directory).processor)(directory)
        if self.video_limits is not None:
            processor.video_limits = self.video_limits
        return processor

    def prompt(self, name: str) -> Prompt:
        return _prompt(self, name)

    def prompt_by(self, name: str, processor: Any) -> Prompt:
        """By another processor than the directory's."""
        if self.version:
            return minicpmv.golden_prompt(processor, self.directory, name)
        if self.hears:
            return qwen3_asr.golden_prompt(processor, name)
        golden = self.inputs["prompts"][name]
        options = {key: golden[key] for key in ("add_vision_id",) if self.qwen} | golden.get("template_kwargs", {})
        return golden_prompt(processor, self.directory, name, **options)

    @property
    def images(self) -> list[str]:
        names = (name for name in self.expected if re.fullmatch(r"image\.\d+\.embeds", name))
        return numbered(names, "image.", ".embeds")

    @property
    def videos(self) -> list[str]:
        return [name.removesuffix(".embeds") for name in self.expected if re.fullmatch(r"video\.\w+\.embeds", name)]

    @property
    def packs(self) -> list[str]:
        """Names of items whose embeddings were recorded together: one item, or all of a prompt of MiniCPM-V."""
        return self.pictured if self.version else [*self.images, *self.videos]

    def items(self, pack: str) -> tuple[MediaItem, ...]:
        return self.prompt(pack).items if self.version else (_item(self.name, pack),)

    def embeds(self, pack: str) -> Tensor:
        """Recorded embeddings of a pack; features of DeepStack lie behind them, as encoders lay them out."""
        if self.version:
            return self.of(pack, "slice_embeds").flatten(0, 1)
        features = self.expected.get(f"{pack}.deepstack", ())
        return torch.cat((self.expected[f"{pack}.embeds"], *features), dim=1)

    def packs_of(self, prompt: str) -> list[str]:
        """The packs of a prompt's items, in order."""
        if self.version:
            return [prompt]
        files = [part.get("video", [part.get("image")])[0] for part in golden_parts(self.directory, prompt)]
        stems = [Path(file).stem for file in files]
        return [s.replace("image", "image.") if "image" in s else f"video.{s.split('_')[0]}" for s in stems]

    def poisoned(self, encoder: Any) -> tuple[Any, dict[str, float], dict[str, float]]:
        """Fills of padded rows whose values are plain, and those that make every intermediate of these rows NaN."""
        if "minicpmv" in self.name:
            encoder.tower.position_embedding.weight[UNREAD] = NAN
            return encoder, {"position_ids": 0, "pixels": 0}, {"position_ids": UNREAD, "pixels": 255}
        if self.hears:
            return encoder, {"mel": 0.0}, {"mel": NAN}
        if not self.qwen:
            return encoder, {"positions": 0.0, "pixels": 0}, {"positions": NAN, "pixels": 255}
        encoder.byte_values.view(3, 256)[:, 255] = NAN
        return encoder, {"pixels": 0}, {"pixels": 255}

    def rows(self, bucket: Bucket) -> int:
        """Rows of an encoder's output."""
        if self.version:
            return int(bucket["groups"] * self.processor.config.num_queries)
        if self.hears:
            return bucket["patches"]
        return bucket["patches"] // (16 if self.merges_windows else 4)

    def nan_run(self, encoder: Any, plan: Plan) -> AbstractContextManager[Plan]:
        """A plan that makes every row of the largest bucket NaN inside the context. plan: of any items."""
        if self.qwen:
            return bytes_of_nan(encoder, self.largest, plan)
        self.poisoned(encoder)
        return nullcontext(self._nan_plan())

    def _nan_plan(self) -> Plan:
        rows, sequences = self.largest["patches"], self.largest["sequences"]
        ends = np.linspace(0, rows, sequences + 1).astype(np.int32)
        if "minicpmv" in self.name:
            arrays = {"position_ids": np.full(rows, UNREAD, dtype=np.int32), "cu_slices": ends}
            return Plan(arrays | ({"cu_groups": ends} if self.version else {}), required=self.largest)
        arrays = {"cu_seqlens": ends, "merge_index": np.arange(rows, dtype=np.int64)}
        return Plan(arrays, fills={"positions": NAN}, required=self.largest)


@cache
def _expected(name: str) -> dict[str, Tensor]:
    return load_file(GOLDEN / name / "expected.safetensors")


@cache
def _processor(family: Family) -> Any:
    return family.processor_of(family.directory)


@cache
def _model(family: Family, device: str, dtype: torch.dtype) -> Any:
    return family.fresh(device, dtype)


@cache
def _prompt(family: Family, prompt: str) -> Prompt:
    return family.prompt_by(prompt, family.processor)


@cache
def _item(name: str, item: str) -> MediaItem:
    family = FAMILIES[name]
    if item.startswith("image."):
        picture = Image.open(family.directory / f"images/{item.replace('.', '')}.png")
        return family.processor.image(picture.convert("RGB"))
    start = f"images/{item.removeprefix('video.')}_"
    parts = (part for prompt in family.prompts for part in golden_parts(family.directory, prompt))
    part = next(part for part in parts if part["type"] == "video" and part["video"][0].startswith(start))
    known = {key: part[key] for key in ("fps", "frames_indices") if key in part}
    return family.processor.video(golden_video(family.directory, part["video"], **known))


def kimi_item(frames: int, rows: int, columns: int, seed: int) -> MediaItem:
    return kimi_frames([(2 * rows, 2 * columns)] * frames, seed)


def kimi_frames(grids: list[tuple[int, int]], seed: int = 0) -> MediaItem:
    """Frames of random pixels of (rows, columns) patches; both even."""
    values = np.random.default_rng(seed)
    frames = tuple(values.integers(0, 256, (14 * rows, 14 * columns, 3), dtype=np.uint8) for rows, columns in grids)
    patches = sum(rows * columns for rows, columns in grids)
    arrays = {"grids": np.array(grids, dtype=np.int32)}
    kind = "image" if len(grids) == 1 else "video"
    return MediaItem(kind, frames, arrays, patches, len(grids), patches // 4, media_digest(kind, frames, arrays, b""))


def minicpmv_item(groups: list[list[tuple[int, int, int]]], queries: int, seed: int) -> MediaItem:
    """Groups of slices of random pixels of (rows, columns) patches, with a temporal id each."""
    values = np.random.default_rng(seed)
    slices = [one for group in groups for one in group]
    frames = [values.integers(0, 255, (14 * rows, 14 * columns, 3), dtype=np.uint8) for rows, columns, _ in slices]
    arrays = {
        "group_sizes": np.array([len(group) for group in groups], dtype=np.int32),
        "temporal_ids": np.array([time for _, _, time in slices], dtype=np.int32),
        "grid": np.zeros(2, dtype=np.int32),
    }
    patches = sum(rows * columns for rows, columns, _ in slices)
    return MediaItem("video", tuple(frames), arrays, patches, len(slices), len(groups) * queries, bytes(32))


def merged_item(frames: int, rows: int, columns: int, seed: int) -> MediaItem:
    """Slices of random pixels of (rows, columns) squares of 4 x 4 patches."""
    values = np.random.default_rng(seed)
    slices = tuple(values.integers(0, 255, (56 * rows, 56 * columns, 3), dtype=np.uint8) for _ in range(frames))
    tokens = frames * rows * columns
    return MediaItem("video", slices, {"grid": np.zeros(2, dtype=np.int32)}, 16 * tokens, frames, tokens, bytes(32))


def _merging(name: str) -> Family:
    return Family(
        name,
        buckets=(
            {"patches": 64, "sequences": 3, "fine_sequences": 0, "max_seqlen": 64},
            {"patches": 240, "sequences": 4, "fine_sequences": 0, "max_seqlen": 240},
            {"patches": 1280, "sequences": 25, "fine_sequences": 0, "max_seqlen": 256},
        ),
        largest={"patches": 512, "sequences": 16, "fine_sequences": 0, "max_seqlen": 512},
        smaller={"patches": 256, "sequences": 8, "fine_sequences": 0, "max_seqlen": 256},
        random=merged_item,
        full=(((1, 3, 5, 0),), tuple((1, 1 + seed % 2, 1, seed) for seed in range(25))),
    )


def _minicpmv(version: str) -> Family:
    name = f"minicpmv_{version.replace('.', '_')}"

    def random(frames: int, rows: int, columns: int, seed: int) -> MediaItem:
        """4.5 fuses frames into a group, the others have one for each."""
        slices = [(rows, columns, 7 * index - 1) for index in range(frames)]
        groups = [slices] if version == "4.5" else [[one] for one in slices]
        return minicpmv_item(groups, FAMILIES[name].processor.config.num_queries, seed)

    def bucket(patches: int, sequences: int, longest: int) -> Bucket:
        sizes = {"patches": patches, "sequences": sequences, "groups": sequences}
        return sizes | {"max_seqlen": longest, "max_group_keys": patches}

    largest, smaller = bucket(512, 16, 64), bucket(256, 8, 64)
    return Family(
        name,
        chunk=48,
        embeds_tolerance=3e-5,
        buckets=(bucket(24, 2, 16), bucket(70, 5, 36), bucket(200, 24, 64)),
        random=random,
        side=7,
        engine={"encoder_buckets": (210, 420)},
        full=(((2, 3, 4, 0),), tuple((1, 1 + seed % 3, 2, seed) for seed in range(24))),
        largest=largest | {"max_group_keys": 256},
        smaller=smaller,
    )


FEW = tuple((1, 1 + seed % 2, 1, seed) for seed in range(24))
FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("qwen2_vl", full=(((1, 3, 5, 0),), FEW), video_limits=golden_video_limits(GOLDEN / "qwen2_vl")),
        Family(
            "qwen2_5_vl",
            side=9,
            buckets=(
                {"patches": 16, "sequences": 3, "max_seqlen": 16, "windows": 3},
                {"patches": 140, "sequences": 4, "max_seqlen": 140, "windows": 5},
                {"patches": 480, "sequences": 24, "max_seqlen": 256, "windows": 40},
            ),
            full=(((1, 5, 7, 0),), FEW, ((20, 1, 9, 0), *((1, 1, 5, seed) for seed in range(5)))),
            largest={"patches": 512, "sequences": 16, "max_seqlen": 512, "windows": 32},
            smaller={"patches": 384, "sequences": 8, "max_seqlen": 384, "windows": 16},
            # Within these the frames of the fixture keep their size.
            video_limits=VideoLimits(3136, 16_000, 10**9),
        ),
        Family("qwen3_vl", chunk=13, random=partial(random_item, block=32), full=(((1, 3, 5, 0),), FEW)),
        Family("qwen3_vl_moe", chunk=13, random=partial(random_item, block=32), full=(((1, 3, 5, 0),), FEW)),
        Family("qwen3_5", chunk=13, random=partial(random_item, block=32), full=(((1, 3, 5, 0),), FEW)),
        Family("qwen3_5_moe", chunk=13, random=partial(random_item, block=32), full=(((1, 3, 5, 0),), FEW)),
        Family(
            "kimi_vl",
            buckets=(
                {"patches": 24, "sequences": 2, "max_seqlen": 24},
                {"patches": 96, "sequences": 6, "max_seqlen": 96},
                {"patches": 256, "sequences": 16, "max_seqlen": 256},
            ),
            random=kimi_item,
            engine={"encoder_buckets": (64, 160)},
            full=(((1, 3, 2, 0),), ((1, 1, 24, 0),), tuple((1, 2, 2, seed) for seed in range(16)), ((16, 1, 1, 0),)),
        ),
        _minicpmv("2.5"),
        _minicpmv("2.6"),
        _minicpmv("4.0"),
        _minicpmv("4.5"),
        _merging("minicpmv_4_6"),
        _merging("minicpmv_4_7"),
    )
}


def recording(frames: int, rows: int, columns: int, seed: int) -> MediaItem:
    """Noise of so many times 500 samples."""
    samples = np.random.default_rng(seed).normal(0, 0.1, 500 * frames * rows * columns)
    item: MediaItem = RECOGNISER.processor.item(samples.astype(np.float32))
    return item


RECOGNISER = Family(
    "qwen3_asr",
    chunk=13,
    buckets=tuple({"patches": 13 * chunks, "sequences": windows} for chunks, windows in ((2, 1), (6, 4), (18, 12))),
    random=recording,
    side=5,
    full=(((1, 8, 8, 0),), ((3, 8, 8, 0),), tuple((1, 8, 4, seed) for seed in range(12)), ((9, 8, 8, 0),)),
)
"""It takes a recording and no messages: not one of FAMILIES."""
HEARING = pytest.param(RECOGNISER, id=RECOGNISER.name)

IN_FULL = "qwen3_vl"
"""The family all of whose cases are in `make test`."""


def families(*names: str, quick: tuple[str, ...] = (IN_FULL,)) -> list[Any]:
    """Parameters for all families, or the named ones; those that are not `quick` are slow."""
    return [
        pytest.param(FAMILIES[name], id=name, marks=[] if name in quick else [pytest.mark.slow])
        for name in names or FAMILIES
    ]


QWEN = tuple(name for name in FAMILIES if name.startswith("qwen"))
ALL = tuple(FAMILIES)
