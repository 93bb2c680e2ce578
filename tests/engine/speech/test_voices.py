"""Pages of voices' references that streams share: found, kept, evicted, and never heard."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.voxcpm2.model import VoxCPM2
from service.engine.speech.runner import make_copies
from service.engine.speech.sequence import voice_pages
from service.engine.speech.stream import PageCopy, Stream
from service.link.messages import Abort, Control, Request, SpeechRequest
from tests.engine.speech.rig import Heard, WorkerRig, same
from tests.engine.speech.test_worker import TEXTS, request, segment
from tests.models.voxcpm2 import golden
from tests.support.slow import slow

PATCHES = (14, 15, 20, 40)
"""In the references of the voices: with the token before them they fill 0, 1, 1 and 2 pages and begin 1, 0, 1 and 1."""


def reference(voice: int) -> np.ndarray:
    return np.random.default_rng(voice).standard_normal((PATCHES[voice], *golden.PATCH_SHAPE)).astype(np.float32)


def spoken(number: int, voice: int, segments: int = 1, retries: int = 0, continued: int = 0) -> SpeechRequest:
    """retries: of each segment, which never stops by itself. continued: patches of audio that it goes on with."""
    parts = [segment(TEXTS[(number + part) % len(TEXTS)], 4, 3 if retries else 4) for part in range(segments)]
    prompt = np.random.default_rng(number).standard_normal((continued, *golden.PATCH_SHAPE)).astype(np.float32)
    return request(
        f"{number}",
        *parts,
        seed=number,
        live=not retries,
        retries=retries,
        reference=reference(voice),
        prompt=prompt if continued else None,
        transcript_ids=parts[0].text_ids * 2 if continued else (),
    )


@pytest.fixture(scope="module")
def alone(model: VoxCPM2) -> dict[tuple[int, ...], Heard]:
    return Alone(model)


class Alone(dict[tuple[int, ...], Heard]):
    """By the arguments of `spoken`: eagerly, in a worker that has seen nothing before."""

    def __init__(self, model: VoxCPM2) -> None:
        super().__init__()
        self._model = model

    def __missing__(self, key: tuple[int, ...]) -> Heard:
        rig = WorkerRig(self._model, graphs=False)
        self[key] = rig.alone(spoken(*key))
        return self[key]


@pytest.mark.parametrize("graphs", [slow(True), False], ids=["replayed", "eager"])
def test_a_stream_of_nan_patches_fails_alone(model: VoxCPM2, alone: dict[tuple[int, ...], Heard], graphs: bool) -> None:
    rig = WorkerRig(model, graphs=graphs)
    broken = spoken(1, 2, 2)
    assert broken.reference is not None
    broken.reference[3, 0, 0] = np.nan
    heard = rig.run({0: [spoken(0, 3, 2), broken]})
    failed = heard["1"].failed
    assert failed is not None and (failed.status, failed.code) == (500, "engine_error") and not heard["1"].deltas
    assert [event.value for event in rig.events("corrupted_requests_total")] == [1]
    same(heard["0"], alone[0, 3, 2])
    rig.assert_clean()


VISITS = st.tuples(
    st.integers(0, 3),
    st.sampled_from([(1, 0, 0), (1, 0, 0), (3, 0, 0), (2, 1, 0), (2, 0, 9)]),
    st.integers(0, 5),
    st.sampled_from([None, None, 1, 4]),
)
"""Voice; segments, retries and patches that are continued; the turn when it comes; after how many it leaves."""


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(
    visits=st.lists(VISITS, min_size=2, max_size=7),
    pages=st.sampled_from([12, 20, 64]),
    step_tokens=st.sampled_from([8, 24, 48]),
    graphs=st.booleans(),
)
def test_any_mix_of_voices_sounds_as_if_each_were_alone(
    model: VoxCPM2,
    alone: dict[tuple[int, ...], Heard],
    visits: list[tuple[int, tuple[int, int, int], int, int | None]],
    pages: int,
    step_tokens: int,
    graphs: bool,
) -> None:
    """Streams come at any turn and some leave early, over a cache that is too small for all and in chunks that end
    anywhere in a page."""
    rig = WorkerRig(model, tokens=16 * pages, step_tokens=step_tokens, graphs=graphs)
    script: dict[int, list[Request | Control]] = {}
    for number, (voice, kind, turn, leaves) in enumerate(visits):
        script.setdefault(turn, []).append(spoken(number, voice, *kind))
        if leaves is not None:
            script.setdefault(turn + leaves, []).append(Abort(f"{number}"))
    heard = rig.run(script)
    for number, (voice, kind, _, leaves) in enumerate(visits):
        if leaves is None:
            same(heard[f"{number}"], alone[number, voice, *kind])
    rig.assert_clean()


def test_a_page_is_known_by_all_that_its_keys_depend_on() -> None:
    ids = np.arange(60)
    patches = reference(3)
    pages = voice_pages(ids, patches, "", 16)
    assert [page.patches for page in pages] == [15, 16, 9]
    assert [page.positions for page in pages] == [16, 16, 9]
    assert voice_pages(ids, patches.copy(), "", 16) == pages
    changed = patches.copy()
    changed[20] += 1
    first, *later = voice_pages(ids, changed, "", 16)
    assert first == pages[0] and not set(later) & set(pages)
    changed = patches.copy()
    changed[3] += 1
    others = [*voice_pages(ids, changed, "", 16), *voice_pages(ids, patches, "adapter", 16)]
    assert len({page.digest for page in (*pages, *others)}) == 9
    assert voice_pages(ids, patches[:15], "", 16) == pages[:1]
    shorter, longer = (voice_pages(ids, patches[:count], "", 16) for count in (19, 20))
    assert shorter[0] == longer[0] and shorter[1].digest != longer[1].digest
    assert voice_pages(ids, patches[:0], "", 16) == ()


def test_all_sources_of_copies_are_read_before_a_page_is_written() -> None:
    """A page may be evicted for a stream of the same launch that gets a copy of another."""
    pages = torch.arange(2 * 5 * 3).view(2, 5, 3, 1).clone()
    before = pages.clone()
    streams = [spoken_stream(copy) for copy in (PageCopy(1, 2), None, PageCopy(2, 3), PageCopy(2, 4))]
    make_copies(streams, [pages])
    assert pages[:, 2:].tolist() == before[:, [1, 2, 2]].tolist() and torch.equal(pages[:, :2], before[:, :2])
    assert [stream.page_copy for stream in streams] == [None] * 4
    make_copies(streams, [pages])
    assert pages[:, 2:].tolist() == before[:, [1, 2, 2]].tolist()


def spoken_stream(page_copy: PageCopy | None) -> Stream:
    return Stream("", True, 0.0, 10, 1, 1, 1, page_copy=page_copy)
