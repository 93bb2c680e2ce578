"""The sampler's benchmark measures what it says: filters that filter, and rows that go on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import sampler
from service.engine.chat.slot_state import IntColumn

CPU = torch.device("cpu")
VOCABULARY = 500


@pytest.mark.parametrize("case", sampler.CASES)
def test_a_case_samples_what_its_parameters_leave(case: str) -> None:
    parameters = sampler.CASES[case]
    with torch.inference_mode():
        runner, plan, state = sampler.prepared(parameters, 4, VOCABULARY, CPU)
        logits = plan.tensors["hidden"][0]
        tokens = torch.stack([runner.run(plan).outputs["results"][:4, 0].long() for _ in range(30)])
    assert state.ints[1:5, IntColumn.GENERATED].tolist() == [30] * 4, "a replay is a step of rows that go on"
    places = (logits[None] > logits.gather(1, tokens.T).T[:, :, None]).sum(dim=-1)
    kept = {"plain, greedy": 1, "top_k 50": 50, "top_k 100, top_p 0.8": 100, "all": 100}
    assert int(places.max()) < kept.get(case, VOCABULARY)
    assert len(set(tokens[:, 0].tolist())) == 1 if case == "plain, greedy" else len(set(tokens[:, 0].tolist())) > 1


def test_its_result_has_a_row_for_each_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    written = json.loads(sampler.main(["--rows", "2", "--vocabulary", str(VOCABULARY)]).read_text())
    assert [row["case"] for row in written["rows"]] == list(sampler.CASES)
    assert all(row["graph_ms"] > 0 and row["rows"] == 2 for row in written["rows"])
