"""Makes the model that sees refuse more of what it does not know, and no more of what it knows.

    REPRISE_WORLD_FONTS=build/fonts python -m training.vision.calibration OUT/vision.pt calibrated.safetensors

"I see ..." and "I only know ..." part at the second word. Of pictures like the trained ones the first is far ahead; of
others that the model takes for its own, it often is not. So NATS go to the logit of " only" behind "I": its row of the
embeddings moves by the vector whose product with the hidden values behind "I" is NATS.
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from training.loop import device, save_weights
from training.vision.blocks import on_device, packed
from training.vision.conversations import encode, make_example
from training.vision.network import Network, load
from training.vision.questions import ONLY

NATS = 3.0
EXAMPLES = 400


@torch.no_grad()
def hidden_behind(network: Network, token: int) -> Tensor:
    """Last hidden values [n, hidden_size] at every `token` with which an answer of training begins."""
    random, found = Random("calibration"), list[Tensor]()
    examples = [make_example(random) for _ in range(EXAMPLES)]
    for held, _ in on_device(examples, next(network.parameters()).device):
        batch, labels, turns = packed(held), held["labels"].flatten(), held["turns"].flatten()
        hidden = network.model(batch, network.visual(batch)).float()
        begins = turns != turns.roll(1)
        found.append(hidden[((labels == token) & begins).roll(1)])
    return torch.cat(found)


def calibrate(weights: Path, out: Path) -> None:
    first, second = encode(ONLY)[:2]
    network = load(weights, device())
    rows = hidden_behind(network, first).cpu()
    ridge = rows.T @ rows + torch.eye(rows.shape[1])
    network.model.embed_tokens.weight.data[second] += NATS * torch.linalg.solve(ridge, rows.sum(0)).to(device())
    save_weights(out, network.state_dict())


if __name__ == "__main__":
    calibrate(*map(Path, sys.argv[1:3]))
