"""A prefill of speech that runs out of memory is launched once more, and nobody hears it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from models.voxcpm2.model import VoxCPM2
from service.engine.speech.runner import make_copies
from service.engine.speech.stream import PageCopy
from tests.engine.speech.rig import Heard, WorkerRig, same
from tests.engine.speech.test_voices import Alone, spoken, spoken_stream
from tests.engine.speech.test_worker import request
from tests.support.out_of_memory import MESSAGE, OutOfMemory, retries


@pytest.fixture(scope="module")
def alone(model: VoxCPM2) -> dict[tuple[int, ...], Heard]:
    return Alone(model)


@pytest.mark.slow
@pytest.mark.parametrize("route", ["replayed", "eager"])
def test_nothing_sounds_different_if_every_prefill_runs_out_of_memory_at_first(
    model: VoxCPM2, alone: dict[tuple[int, ...], Heard], monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    """Voices whose pages are shared and copied, further segments and takes, and audio that is continued."""
    fault = OutOfMemory(monkeypatch, model, "prefill", times=0)
    rig = WorkerRig(model, graphs=route == "replayed", max_running=8, step_tokens=48)
    fault.at_first_tries_of(rig.worker._runner, "_launch_pass")
    asked = [(0, 3, 2, 0, 0), (1, 3, 1, 0, 0), (2, 0, 2, 1, 0), (3, 2, 2, 0, 9), (4, 3, 1, 0, 0), (5, 2, 1, 0, 0)]
    heard = rig.run({2 * turn: [spoken(*kind)] for turn, kind in enumerate(asked)})
    for kind in asked:
        same(heard[f"{kind[0]}"], alone[kind])
    rig.assert_clean()
    found = retries(rig.observations.drain())
    assert {outcome for _, outcome in found} == {"succeeded"} and sum(found.values()) == fault.failed >= 6


def test_what_fails_behind_a_pass_fails_its_prompts_alone(model: VoxCPM2, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = WorkerRig(model, graphs=False)
    runner = rig.worker._runner

    def with_new(sequences: Any) -> bool:
        return any(sequence.request.request_id == "new" for sequence in sequences)

    fault = OutOfMemory(monkeypatch, runner, "_begin_attempts", chosen=with_new)
    heard = rig.run({0: [request("row")], 3: [request("new")]})
    assert fault.failed == 1 and heard["new"].failed is not None and heard["row"].failed is None
    assert not retries(rig.observations.drain())
    rig.assert_clean()


@pytest.mark.parametrize(
    ("method", "error", "failed"),
    [
        ("launch_decode", None, (503, "out_of_memory")),
        ("launch_decode", ValueError("a bug"), (500, "engine_error")),
        ("_launch_pass", ValueError("a bug"), (500, "engine_error")),
    ],
)
def test_what_fails_otherwise_ends_its_streams_and_no_later_one(
    model: VoxCPM2, monkeypatch: pytest.MonkeyPatch, method: str, error: Exception | None, failed: tuple[int, str]
) -> None:
    rig = WorkerRig(model, graphs=False)
    usual = rig.alone(request("usual"))
    fault = OutOfMemory(monkeypatch, rig.worker._runner, method, times=1, error=error)
    heard = rig.alone(request("failed"))
    assert heard.failed is not None and (heard.failed.status, heard.failed.code) == failed and fault.failed == 1
    same(rig.alone(request("next")), usual)
    assert not retries(rig.observations.drain())
    rig.assert_clean()


class Full:
    """Pages of layers for whose copies there is no memory."""

    device = torch.device("cpu")

    def index_select(self, *args: object) -> torch.Tensor:
        raise torch.OutOfMemoryError(MESSAGE)


def test_copies_of_pages_for_which_there_is_no_memory_are_still_to_be_made() -> None:
    pages = torch.arange(2 * 5 * 3).view(2, 5, 3, 1).clone()
    before = pages.clone()
    streams = [spoken_stream(copy) for copy in (PageCopy(1, 2), PageCopy(2, 3))]
    with pytest.raises(torch.OutOfMemoryError):
        make_copies(streams, [pages, Full()])  # type: ignore[list-item]
    assert torch.equal(pages, before)
    make_copies(streams, [pages])
    np.testing.assert_array_equal(pages[:, 2:4], before[:, 1:3])
