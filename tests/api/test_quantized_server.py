"""`reprise serve` with weights in 8 bits (`--quantization fp8`), and with a checkpoint that is published in 4 bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI
from safetensors.torch import load_file
from tokenizers import Tokenizer

from tests.api.test_meaning import MODEL, SEEN, check_answers, shapes_part
from tests.support.golden import GOLDEN, inputs
from tests.support.processes import ServerProcess, served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    home = str(tmp_path_factory.mktemp("home"))
    with served("--quantization", "fp8", "--dtype", "auto", "--max-frames", "16", HOME=home) as running:
        yield running


async def test_answers_among_others_are_right(server: ServerProcess) -> None:
    await check_answers(server)


def test_other_weights_give_the_plain_servers_answer(server: ServerProcess, embedded_server: ServerProcess) -> None:
    message: Any = {"role": "user", "content": [shapes_part(), {"type": "text", "text": "What is in this picture?"}]}
    chances = []
    for url in (server.url, embedded_server.url):
        with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600) as client:
            choice = client.chat.completions.create(model=MODEL, messages=[message], logprobs=True).choices[0]
        assert choice.message.content == SEEN
        assert choice.logprobs is not None and choice.logprobs.content is not None
        chances.append([token.logprob for token in choice.logprobs.content])
    assert chances[0] != chances[1]


def test_a_published_checkpoint_answers_as_its_reference(tmp_path_factory: pytest.TempPathFactory) -> None:
    """AWQ: the log-probabilities of twenty greedy tokens among those that the tokenizer has; the table is larger."""
    directory = GOLDEN / "quantised/awq"
    expected = load_file(directory / "expected.safetensors")
    logits, ids = (expected[f"prompt.text.generated_{what}"] for what in ("logits", "ids"))
    known = Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab_size()
    wanted = logits[:, :known].log_softmax(-1).gather(-1, ids[:, None])[:, 0].tolist()
    messages: Any = inputs(directory)["prompts"]["text"]["messages"]
    home = str(tmp_path_factory.mktemp("home"))
    with (
        served("--model", str(directory), "--dtype", "float32", HOME=home) as running,
        OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=600) as client,
    ):
        model = client.models.list().data[0].id
        choice = client.chat.completions.create(
            model=model, messages=messages, max_tokens=len(ids), temperature=0, logprobs=True
        ).choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [token.logprob for token in choice.logprobs.content] == pytest.approx(wanted, abs=2e-4)
