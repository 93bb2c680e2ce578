"""The network and the conversations of training are those of the product: logits, ids, positions."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from models.interfaces.media import ChatMessage, ContentPart, Prompt, ToolCall, VideoFrames, VideoMetadata
from models.qwen_vl.model import load_model
from models.qwen_vl.processor import Qwen2VLProcessor, load_processor
from tests.support.chat_golden import generate
from tests.support.prompts import prompt_of
from training.loop import publish
from training.vision.blocks import on_device, pack, packed
from training.vision.conversations import ASKED, DEFAULT_SYSTEM, END, PICTURES, QUESTION, Example, opening, tokens_of
from training.vision.network import CONFIG, PUBLISHED, Network
from training.vision.pictures import Picture
from training.vision.questions import Turn
from training.vision.train import Trainer

SMALL = CONFIG | {"num_hidden_layers": 2, "vision_config": CONFIG["vision_config"] | {"depth": 2}}
OPTIONS = Namespace(blocks=1, auxiliary=0.3, compile=False)

pytestmark = pytest.mark.slow


def picture(seed: int, height: int, width: int, *, frames: int = 1) -> Picture:
    pixels = np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)
    return Picture(list(pixels), width, height, motion=("stands",) if frames > 1 else None)


CALL = '<tool_call>\n{"name": "shot", "arguments": {"id": 3}}\n</tool_call>'
RESULT = f"{PICTURES}<tool_response>\ndone\n</tool_response>"
EXAMPLES = {
    "a picture and two turns": Example(
        [picture(0, 224, 252)],
        [[Turn("color", "What color is the ring?", 'The ring says "0w,".'), Turn("read", "a 7?", "It says 12.")]],
        [ASKED],
    ),
    "two pictures": Example(
        [picture(1, 252, 224), picture(2, 224, 336)], [[Turn("count", "How many?", "3 dogs.")]], [opening("Be brief.")]
    ),
    "a video": Example([picture(3, 308, 336, frames=5)], [[Turn("clip", "What moves?", "A é ring.")]], [ASKED]),
    "no picture": Example([], [[Turn("who", "Who are you?", "I am small.")]], [ASKED]),
    "pictures of a tool and in a later turn": Example(
        [picture(4, 224, 224), picture(5, 252, 224)],
        [[Turn("color", "And this?", "Red."), Turn("read", "What is new?", "It says 7.", shows=1)]],
        [(*opening(DEFAULT_SYSTEM, ("user", "Look."), ("assistant", CALL))[:-1], ("user", RESULT), ("user", QUESTION))],
    ),
}


@pytest.fixture(scope="module")
def network() -> Network:
    torch.manual_seed(3)
    network = Network(SMALL)
    for parameter in network.parameters():
        # Norms of one and biases of zero would hide mistakes in them.
        parameter.data += 0.05 * torch.randn_like(parameter)
        parameter.data = parameter.data.bfloat16().float()
    return network


@pytest.fixture(scope="module")
def directory(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    publish(PUBLISHED, directory, network.state_dict())
    (directory / "config.json").write_text(json.dumps(SMALL), "utf-8")
    return directory


def prompt_and_answer(processor: Qwen2VLProcessor, example: Example) -> tuple[Prompt, int]:
    """All turns as the server sees them when it is to say the last answer, and the number of its tokens."""
    items, parts = [], []
    for shown in example.pictures:
        if shown.motion:
            count = len(shown.frames)
            metadata = VideoMetadata(count, 2.0, count / 2, shown.height, shown.width)
            frames = VideoFrames(tuple(shown.frames), tuple(range(count)), tuple(i / 2 for i in range(count)), metadata)
            items.append(processor.video(frames))
        else:
            items.append(processor.image(Image.fromarray(shown.frames[0])))
        parts.append(ContentPart(item=len(items) - 1))
    turns, messages = example.conversations[0], []
    for index, turn in enumerate(turns):
        for role, text in example.openings[0] if index == 0 else (("user", PICTURES * turn.shows + QUESTION),):
            shown = turn.shows or len(example.pictures) - sum(turn.shows for turn in turns)
            own = [parts.pop(0) for _ in range(shown if PICTURES in text else 0)]
            said = "done" if text == RESULT else text.removeprefix(PICTURES).replace(QUESTION, turn.question)
            message = ChatMessage("tool" if text == RESULT else role, (*own, ContentPart(text=said)))
            called = ChatMessage(role, tool_calls=(ToolCall("shot", {"id": 3}),))
            messages += [] if said == DEFAULT_SYSTEM else [called if text == CALL else message]
        if turn is not turns[-1]:
            messages.append(ChatMessage("assistant", (ContentPart(text=turn.answer),)))
    return prompt_of(processor, messages, items), len(processor.tokenize(turns[-1].answer))


@pytest.mark.parametrize("name", EXAMPLES)
def test_logits_ids_and_positions_are_the_products(network: Network, directory: Path, name: str) -> None:
    example, processor = EXAMPLES[name], load_processor(directory)
    prompt, answer = prompt_and_answer(processor, example)
    tokens = tokens_of(example.pictures, example.conversations[0], example.openings[0])
    n = len(prompt.token_ids)
    assert tokens.ids[:n].tolist() == prompt.token_ids.tolist()
    assert np.array_equal(tokens.positions[:, :n], prompt.positions)
    assert tokens.labels[n - 1 : n + answer].tolist() == [*tokens.ids[n : n + answer].tolist(), END]

    # Another example before it: nothing may be seen of that.
    before = EXAMPLES["two pictures" if name == "a picture and two turns" else "a picture and two turns"]
    ((found, _),) = on_device([before, example], torch.device("cpu"))
    batch = packed(found)
    with torch.no_grad():
        trained = network.logits(network.model(batch, network.visual(batch)))
    last = found["turns"].flatten() == found["turns"].max()
    assert found["labels"].flatten()[last].tolist() == tokens.labels[n - 1 : n + answer].tolist()

    model = load_model(directory, "cpu", torch.float32)
    _, steps, _ = generate(model, prompt, answer + 1, forced=tokens.ids[n : n + answer + 1].tolist())
    assert float((trained[last][:, : steps.shape[1]] - steps).abs().max()) < 1e-4 * float(steps.abs().max())


def test_steps_lower_the_loss() -> None:
    ((block, _),) = pack([EXAMPLES["a picture and two turns"], EXAMPLES["a video"]])
    torch.manual_seed(0)
    trainer = Trainer(Network(SMALL), OPTIONS, None)
    for name, value in block.items():
        trainer.batch[name][0] = value
    losses = [float(trainer.step(2e-3, 0.0)["answers"]) for _ in range(3)]
    assert losses[-1] < losses[0]
