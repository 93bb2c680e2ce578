"""`reprise serve --quantization fp8` with the embedded models: answers of weights in 8 bits; speech refuses them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI
from typer.testing import CliRunner

from service.cli.main import app
from tests.api.test_meaning import MODEL, SEEN, check_answers, shapes_part
from tests.support.processes import ROOT, ServerProcess, served

SPEECH = str(ROOT / "models/embedded/voxcpm2")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    home = str(tmp_path_factory.mktemp("home"))
    with served("--quantization", "fp8", "--dtype", "auto", "--max-frames", "16", HOME=home) as running:
        yield running


async def test_answers_among_others_are_right(server: ServerProcess) -> None:
    await check_answers(server)


def test_the_answer_is_that_of_the_plain_server_and_its_weights_are_not(
    server: ServerProcess, embedded_server: ServerProcess
) -> None:
    message: Any = {"role": "user", "content": [shapes_part(), {"type": "text", "text": "What is in this picture?"}]}
    chances = []
    for url in (server.url, embedded_server.url):
        with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600) as client:
            choice = client.chat.completions.create(model=MODEL, messages=[message], logprobs=True).choices[0]
        assert choice.message.content == SEEN
        assert choice.logprobs is not None and choice.logprobs.content is not None
        chances.append([token.logprob for token in choice.logprobs.content])
    assert chances[0] != chances[1]


def dry_run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["serve", "--dry-run", "--gpu-memory", "24G", *arguments])


def test_speech_alone_is_refused_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    """Beside a chat model it is taken: `server` hosts both."""
    done = dry_run("--quantization", "fp8", "--model", SPEECH)
    assert done.exit_code == 2
    assert "quantization: fp8 is for chat models, and speech models stay in 16 bits" in caplog.text + done.output
