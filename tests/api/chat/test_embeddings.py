"""Vectors and scores: what is embedded and reranked, and what the published code makes of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from openai import BadRequestError, OpenAI
from safetensors.torch import save_file

from models.checkpoints.rows import tensor_rows
from models.interfaces.errors import CheckpointError
from service.api.chat.embeddings import instruction
from service.hub import Checkpoint
from service.hub.catalog import Catalog, HostedModel
from tests.media.samples import data_url
from tests.support.fake_chat import FakeProcessor, fake_catalog
from tests.support.openai_chat import openai_client
from tests.support.processes import ROOT
from tests.support.refusals import assert_refused
from tests.support.reranker import GOLDEN, running_reranker
from tests.support.servers import RunningServer, running_server

NAME = "Qwen3-VL-Embedding-tiny"
EXPECTED = json.loads((ROOT / "tests/golden/qwen3_vl_embedding/expected.json").read_text())
TEXT = "what is this ?"
TOLERANCE = 2e-5


def numbers(answer: Any) -> list[np.ndarray]:
    return [np.array(one.embedding) for one in answer.data]


def test_vectors_equal_those_of_the_published_code(tmp_path: Path) -> None:
    """Alone, together in one step, and again from the caches."""
    directory = tmp_path / NAME
    directory.symlink_to(GOLDEN)
    flags = {"model": (str(directory),), "device": "cpu", "kv_cache_tokens": 4096, "served_model_name": ("tiny",)}
    url = data_url((GOLDEN / "images/image1.png").read_bytes())
    shown = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": TEXT}]
    with openai_client(flags) as client:
        for _ in range(2):
            for encoding in ("float", "base64"):
                both = client.embeddings.create(model="tiny", input=[TEXT, ""], encoding_format=encoding)  # type: ignore[call-overload]
                assert both.usage.prompt_tokens == EXPECTED["text"]["tokens"] + EXPECTED["empty"]["tokens"]
                if encoding == "float":
                    for name, vector in zip(("text", "empty"), numbers(both), strict=True):
                        assert np.abs(vector - EXPECTED[name]["vector"]).max() <= TOLERANCE
            extra = {"instruction": "Find a picture"}
            (vector,) = numbers(client.embeddings.create(model="tiny", input=TEXT, extra_body=extra))
            assert np.abs(vector - EXPECTED["instructed"]["vector"]).max() <= TOLERANCE
            messages: list[Any] = [{"role": "user", "content": shown}, {"role": "assistant", "content": ""}]
            seen = client.post("/embeddings", body={"model": "tiny", "messages": messages}, cast_to=httpx.Response)
            (entry,) = seen.json()["data"]
            assert np.abs(np.array(entry["embedding"]) - EXPECTED["picture"]["vector"]).max() <= TOLERANCE
        (short,) = numbers(client.embeddings.create(model="tiny", input=TEXT, dimensions=8))
        first = np.array(EXPECTED["text"]["vector"][:8])
        assert np.abs(short - first / np.linalg.norm(first)).max() <= TOLERANCE
        with pytest.raises(BadRequestError, match="at most 96"):
            client.embeddings.create(model="tiny", input=TEXT, dimensions=97)


@pytest.fixture(scope="module")
def hosted() -> Iterator[RunningServer]:
    """A chat model and an embedding model."""
    vectors = HostedModel(("vectors",), "chat", Checkpoint(NAME, Path("/nowhere")), FakeProcessor, 1)
    with running_server(Catalog([*fake_catalog().models, vectors])) as server:
        yield server


def post(server: RunningServer, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/embeddings", json={"model": "vectors", **body})


def test_inputs_are_one_text_or_several(hosted: RunningServer) -> None:
    for given, lengths in (("abc", [3]), (["abc", "", "x" * 70], [3, 4, 70])):
        answer = post(hosted, input=given).json()
        assert (answer["object"], answer["model"]) == ("list", "vectors")
        assert answer["usage"] == {"prompt_tokens": sum(lengths), "total_tokens": sum(lengths)}
        assert [one["index"] for one in answer["data"]] == list(range(len(lengths)))
        for one, length in zip(answer["data"], lengths, strict=True):
            hidden = np.array([length, 1, 2, 3])
            assert one["embedding"] == pytest.approx(hidden / np.linalg.norm(hidden))
    many = post(hosted, input=[f"{number}" for number in range(300)]).json()
    assert [one["index"] for one in many["data"]] == list(range(300))


def test_the_card_and_the_other_endpoints_know_the_task(hosted: RunningServer) -> None:
    cards = {card["id"]: card for card in httpx.get(f"{hosted.url}/v1/models").json()["data"]}
    assert (cards["vectors"]["kind"], cards["tiny"]["kind"]) == ("embedding", "chat")
    assert cards["vectors"]["architecture"]["output_modalities"] == ["embeddings"]
    refused = post(hosted, model="tiny", input="x")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "wrong_endpoint")
    with OpenAI(base_url=f"{hosted.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(BadRequestError, match="/v1/embeddings"):
            client.chat.completions.create(model="vectors", messages=[{"role": "user", "content": "x"}])
        assert len(client.embeddings.create(model="vectors", input="abc").data[0].embedding) == 4
    assert 'endpoint="embeddings",model="vectors",outcome="ok"' in httpx.get(f"{hosted.url}/metrics").text


def test_an_error_names_the_input(hosted: RunningServer) -> None:
    assert_refused(f"{hosted.url}/v1/embeddings", "embeddings", model="vectors")


def test_an_instruction_ends_with_punctuation() -> None:
    assert [instruction(given) for given in (None, "", " Find it ", "Find it!")] == [
        *("Represent the user's input.",) * 2, "Find it.", "Find it!"
    ]  # fmt: skip


SCORES = json.loads((ROOT / "tests/golden/qwen3_vl_reranker/expected.json").read_text())
RANKED = "a red circle"
SCORE_TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_reranker(tmp_path_factory.mktemp("models")) as running:
        yield running


def ask(server: RunningServer, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{path}", json={"model": "tiny", **body}, timeout=600)


def test_scores_equal_those_of_the_published_code(server: RunningServer) -> None:
    url = data_url((GOLDEN / "images/image1.png").read_bytes())
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": RANKED}]
    documents = {"text": RANKED, "empty": "", "picture": {"image": url}, "both": {"content": parts}}
    ranked = ask(server, "rerank", query=TEXT, documents=[*documents.values()]).json()
    found = {result["index"]: result["relevance_score"] for result in ranked["results"]}
    for index, name in enumerate(documents):
        assert found[index] == pytest.approx(SCORES[name]["score"], abs=SCORE_TOLERANCE), name
    assert ranked["usage"]["prompt_tokens"] == sum(SCORES[name]["tokens"] for name in documents)
    order = [result["relevance_score"] for result in ranked["results"]]
    assert order == sorted(order, reverse=True)
    both = [{"image": url, "text": RANKED}, {"text": RANKED}]
    best = ask(server, "rerank", query={"text": TEXT}, documents=both, top_n=1, return_documents=True).json()
    (first,) = best["results"]
    assert (first["index"], first["document"]) == (1, {"text": RANKED})
    # It was beside other documents in its batch.
    assert first["relevance_score"] == pytest.approx(found[0], abs=SCORE_TOLERANCE)
    asked = {"query": TEXT, "documents": [RANKED], "instruction": "Find a picture."}
    (other,) = ask(server, "rerank", **asked).json()["results"]
    assert other["relevance_score"] == pytest.approx(SCORES["instructed"]["score"], abs=SCORE_TOLERANCE)


def test_the_card_and_the_refusals(server: RunningServer) -> None:
    (card,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert (card["kind"], card["architecture"]["output_modalities"]) == ("rerank", ["rerank"])
    assert_refused(f"{server.url}/v1/rerank", "rerank", model="tiny", query="x")
    for path, body in (
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("embeddings", {"input": "x"}),
    ):
        refused = ask(server, path, **body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model"), refused.text
    assert 'endpoint="rerank",model="tiny",outcome="ok"' in httpx.get(f"{server.url}/metrics").text


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_of_a_matrix_are_those_of_the_file(tmp_path: Path, dtype: torch.dtype) -> None:
    matrix = torch.arange(12, dtype=dtype).reshape(4, 3)
    save_file({"other": matrix + 1, "head": matrix}, tmp_path / "model.safetensors")
    assert tensor_rows(tmp_path, ("none", "head"), (3, 1)).tolist() == [[9, 10, 11], [3, 4, 5]]
    with pytest.raises(CheckpointError, match="none"):
        tensor_rows(tmp_path, ("none",), (0,))
