"""POST /v1/rerank and /v1/score: against transformers, and the protocol."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from models.checkpoints.rows import tensor_rows
from models.interfaces.errors import CheckpointError
from tests.support.processes import ROOT
from tests.support.reranker import GOLDEN, running_reranker
from tests.support.servers import RunningServer

EXPECTED = json.loads((ROOT / "tests/golden/qwen3_vl_reranker/expected.json").read_text())
QUERY, TEXT = "what is this ?", "a red circle"
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_reranker(tmp_path_factory.mktemp("models")) as running:
        yield running


def post(server: RunningServer, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{path}", json={"model": "tiny", **body}, timeout=600)


def test_scores_equal_those_of_the_published_code(server: RunningServer) -> None:
    url = f"data:image/png;base64,{base64.b64encode((GOLDEN / 'images/image1.png').read_bytes()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": TEXT}]
    documents = {"text": TEXT, "empty": "", "picture": {"image": url}, "both": {"content": parts}}
    ranked = post(server, "rerank", query=QUERY, documents=[*documents.values()]).json()
    found = {result["index"]: result["relevance_score"] for result in ranked["results"]}
    for index, name in enumerate(documents):
        assert found[index] == pytest.approx(EXPECTED[name]["score"], abs=TOLERANCE), name
    assert ranked["usage"]["prompt_tokens"] == sum(EXPECTED[name]["tokens"] for name in documents)
    order = [result["relevance_score"] for result in ranked["results"]]
    assert order == sorted(order, reverse=True)
    both = [{"image": url, "text": TEXT}, {"text": TEXT}]
    best = post(server, "rerank", query={"text": QUERY}, documents=both, top_n=1, return_documents=True).json()
    (first,) = best["results"]
    assert (first["index"], first["document"]) == (1, {"text": TEXT})
    assert first["relevance_score"] == pytest.approx(found[0], abs=TOLERANCE)  # beside other documents in its batch
    asked = {"query": QUERY, "documents": [TEXT], "instruction": "Find a picture."}
    (other,) = post(server, "rerank", **asked).json()["results"]
    assert other["relevance_score"] == pytest.approx(EXPECTED["instructed"]["score"], abs=TOLERANCE)


def test_scores_of_pairs_keep_their_order(server: RunningServer) -> None:
    expected = [EXPECTED[name]["score"] for name in ("text", "empty")]
    for first in (QUERY, [QUERY], [QUERY, QUERY]):
        answer = post(server, "score", text_1=first, text_2=[TEXT, ""]).json()
        assert (answer["object"], [one["index"] for one in answer["data"]]) == ("list", [0, 1])
        assert [one["score"] for one in answer["data"]] == pytest.approx(expected, abs=TOLERANCE)


def test_the_card_and_the_refusals(server: RunningServer) -> None:
    (card,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert (card["kind"], card["architecture"]["output_modalities"]) == ("rerank", ["rerank"])
    broken = {"image": "data:image/png;base64,eA=="}
    for path, body, param in (
        ("rerank", {"query": "x", "documents": []}, "documents"),
        ("rerank", {"query": "x", "documents": ["y", broken]}, "documents[1]"),
        ("rerank", {"query": "x", "documents": ["y"], "top_n": 0}, "top_n"),
        ("score", {"text_1": ["x", "y"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "model"),
        ("embeddings", {"input": "x"}, "model"),
    ):
        refused = post(server, path, **body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
    assert 'endpoint="rerank",model="tiny",outcome="ok"' in httpx.get(f"{server.url}/metrics").text


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_of_a_matrix_are_those_of_the_file(tmp_path: Path, dtype: torch.dtype) -> None:
    matrix = torch.arange(12, dtype=dtype).reshape(4, 3)
    save_file({"other": matrix + 1, "head": matrix}, tmp_path / "model.safetensors")
    assert tensor_rows(tmp_path, ("none", "head"), (3, 1)).tolist() == [[9, 10, 11], [3, 4, 5]]
    with pytest.raises(CheckpointError, match="none"):
        tensor_rows(tmp_path, ("none",), (0,))
