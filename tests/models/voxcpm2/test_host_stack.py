"""Local stacks on the CPU in float32 against the same stacks in float64, which run as on any other device."""

from __future__ import annotations

import pytest
import torch

from models.voxcpm2.model import load_model
from models.voxcpm2.stack import LocalStack
from tests.models.voxcpm2.golden import DIRECTORY


@pytest.mark.parametrize("sequences", [1, 4])
def test_equal_to_a_stack_of_another_dtype(sequences: int) -> None:
    networks = [load_model(DIRECTORY, torch.device("cpu"), dtype).network for dtype in (torch.float32, torch.float64)]
    for ours, wide in zip(*(local_stacks(network) for network in networks), strict=True):
        torch.manual_seed(sequences)
        tokens = torch.randn(sequences, ours.length, ours.first_norm.weight.shape[0])
        given = tokens.clone()
        out, expected = ours(tokens), wide(tokens.double())
        assert out.shape == expected.shape == (sequences, ours.kept.stop - ours.kept.start, tokens.shape[-1])
        assert float((out - expected).norm() / expected.norm()) < 2e-6
        assert torch.equal(tokens, given)
        # A norm that the caller has is read in place of the first block's own.
        assert torch.equal(ours(tokens, ours.first_norm(tokens)), out)
        assert not torch.allclose(ours(tokens, 2 * ours.first_norm(tokens)), out)


def local_stacks(network) -> list[LocalStack]:
    return [network.feat_encoder.encoder, network.feat_decoder.decoder]
