"""Qwen3-VL, dense and mixture, against the golden directories through the production loaders."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import Tensor

from models.interfaces.capturable import Bucket
from models.layers.packed import add_table_rows
from tests.models.qwen3_vl.golden import BOTH, CPU, DENSE, MIXTURE, Golden
from tests.support.chat_golden import encode, fill, generate, largest_difference, prompt_rows
from tests.support.golden import with_most
from tests.support.paged import PagedCache

ITEMS = [pytest.param(golden, name, id=f"{kind}-{name}") for kind, golden in BOTH.items() for name in golden.names]
PROMPTS = [pytest.param(golden, name, id=f"{kind}-{name}") for kind, golden in BOTH.items() for name in golden.prompts]
EITHER = [pytest.param(golden, id=kind) for kind, golden in BOTH.items()]


@pytest.mark.parametrize(("golden", "name"), ITEMS)
def test_preprocessing_is_exact(golden: Golden, name: str) -> None:
    item, expected = golden.item(name), golden.expected
    assert [item.arrays["grid_thw"].tolist()] == expected[f"{name}.grid_thw"].tolist()
    encoder = golden.model.encoder
    rows = encoder.patchify(item, CPU)
    assert hashlib.sha256(rows.numpy().tobytes()).digest() == bytes(expected[f"{name}.pixel_sha256"].tolist())
    assert torch.equal(encoder.byte_values.view(3, 256), expected["norm_table"])
    if f"{name}.pixel_values" in expected:
        assert torch.equal(encoder.normalise(rows), expected[f"{name}.pixel_values"])


@pytest.mark.parametrize(("golden", "name"), ITEMS)
def test_interpolated_positions(golden: Golden, name: str) -> None:
    plan, expected = golden.model.encoder.plan([golden.item(name)]), golden.expected
    assert plan.arrays["table_rows"].tolist() == expected[f"{name}.pos_indices"].tolist()
    assert largest_difference(plan.arrays["table_weights"], expected[f"{name}.pos_weights"]) <= 1e-6
    if f"{name}.coordinates" in expected:
        assert plan.arrays["coordinates"].tolist() == expected[f"{name}.coordinates"].tolist()
    table = golden.model.encoder.position_table
    rows, weights = (torch.from_numpy(plan.arrays[name]) for name in ("table_rows", "table_weights"))
    found = torch.zeros(len(rows), table.shape[1])
    add_table_rows(found, table.detach(), rows, weights)
    assert largest_difference(found, expected[f"{name}.pos_embeds"]) <= 2e-5


@pytest.mark.parametrize(("golden", "name"), ITEMS)
def test_embeddings_and_features(golden: Golden, name: str) -> None:
    assert largest_difference(encode(golden.model.encoder, [golden.item(name)], CPU), golden.embeds(name)) <= 2e-5


@pytest.mark.parametrize("spare", [0, 4, 60])
@pytest.mark.parametrize("golden", EITHER)
def test_all_items_share_a_padded_call(golden: Golden, spare: int) -> None:
    encoder = golden.model.encoder
    plan = encoder.plan([golden.item(name) for name in golden.names])
    patches = plan.required["patches"] + spare
    bucket: Bucket = {
        "patches": patches,
        "sequences": plan.required["sequences"] + spare // 4,
        "max_seqlen": patches,
    }
    buffers = fill(encoder.buffer_specs(bucket), plan, CPU)
    buffers["pixels"][plan.required["patches"] :] = 255
    buffers["coordinates"][plan.required["patches"] :] = 10_000
    with torch.inference_mode():
        embeds = encoder.forward(buffers, bucket)["embeds"]
    expected = torch.cat([golden.embeds(name) for name in golden.names])
    assert embeds.isfinite().all() and embeds.shape[0] == patches // 4
    assert largest_difference(embeds[: len(expected)], expected) <= 2e-5


@pytest.mark.parametrize("golden", EITHER)
def test_a_video_is_encoded_in_parts_of_whole_frame_pairs(golden: Golden) -> None:
    for name in golden.videos:
        item, encoder = golden.item(name), golden.model.encoder
        parts = encoder.split(item, {"patches": 9999, "sequences": 1, "max_seqlen": 9999})
        assert [part.num_sequences for part in parts] == [1] * item.num_sequences
        assert item.num_sequences > 1 and len({part.digest for part in (*parts, item)}) == len(parts) + 1
        pieces = torch.cat([encode(encoder, [part], CPU) for part in parts])
        assert largest_difference(pieces, golden.embeds(name)) <= 2e-5


@pytest.mark.parametrize(("golden", "name"), PROMPTS)
def test_ids_and_positions_are_exact(golden: Golden, name: str) -> None:
    prompt, expected = golden.prompt(name), golden.expected
    assert prompt.token_ids.tolist() == expected[f"prompt.{name}.input_ids"].tolist()
    assert prompt.positions.tolist() == expected[f"prompt.{name}.position_ids"].tolist()
    assert prompt.next_position - len(prompt.token_ids) == expected[f"prompt.{name}.rope_delta"].item()


@pytest.mark.parametrize("chunk", [None, 13])
@pytest.mark.parametrize(("golden", "name"), PROMPTS)
def test_logits_and_greedy_tokens(golden: Golden, name: str, chunk: int | None) -> None:
    """Chunks of 13 cut every picture."""
    tokens = golden.inputs["max_new_tokens"] if chunk is None else 2
    logits, steps, ids = generate(golden.model, golden.prompt(name), tokens, chunk=chunk)
    expected = golden.expected[f"prompt.{name}.logits"]
    assert largest_difference(logits[-len(expected) :], expected) <= 1e-4
    assert ids == golden.expected[f"prompt.{name}.generated_ids"].tolist()[:tokens]
    assert largest_difference(steps, golden.expected[f"prompt.{name}.generated_logits"][:tokens]) <= 1e-4


@pytest.mark.parametrize("golden", EITHER)
def test_chunks_of_a_single_row(golden: Golden) -> None:
    name = with_most(golden.directory)
    logits, _, _ = generate(golden.model, golden.prompt(name), 1, chunk=1)
    expected = golden.expected[f"prompt.{name}.logits"]
    assert largest_difference(logits[-len(expected) :], expected) <= 1e-4


@torch.inference_mode()
def test_the_routers_choice_is_the_references() -> None:
    expected = {key: value for key, value in MIXTURE.expected.items() if ".expert_ids" in key}
    for key, experts in expected.items():
        name = key.split(".")[1]
        chosen: list[tuple[Tensor, Tensor]] = []
        routers = [layer.mlp.router for layer in MIXTURE.model.decoder.layers]

        def keep(_module: object, _inputs: object, choice: tuple[Tensor, Tensor], into: list = chosen) -> None:
            into.append(choice)

        hooks = [router.register_forward_hook(keep) for router in routers]
        generate(MIXTURE.model, MIXTURE.prompt(name), 1)
        for hook in hooks:
            hook.remove()
        weights = MIXTURE.expected[f"prompt.{name}.expert_weights"]
        for layer, (found, indices) in enumerate(chosen):
            order = found.argsort(dim=-1, descending=True)
            assert torch.equal(indices.gather(1, order).int(), experts[layer])
            assert largest_difference(found.gather(1, order), weights[layer]) <= 1e-5
    assert expected


@torch.inference_mode()
@pytest.mark.parametrize("golden", EITHER)
def test_chunks_of_all_prompts_share_batches(golden: Golden) -> None:
    """Chunks of unlike sizes of every prompt in one batch: rows of one must not read the features of another."""
    model = golden.model
    asked = [golden.prompt(name) for name in golden.prompts]
    hidden = [prompt_rows(model, prompt, CPU) for prompt in asked]
    # Beside pictures, text has features of zeros.
    widest = max(rows.shape[1] for rows in hidden)
    hidden = [torch.nn.functional.pad(rows, (0, widest - rows.shape[1])) for rows in hidden]
    cache = PagedCache(model.decoder.cache_specs(), num_pages=128, page_size=8)
    sequences = [cache.new_sequence(len(prompt.token_ids)) for prompt in asked]
    found: list[list[Tensor]] = [[] for _ in asked]
    while True:
        left = {i: len(asked[i].token_ids) - sequences[i].length for i in range(len(asked))}
        counts = {i: min(7 + 3 * i, rows) for i, rows in left.items() if rows}
        if not counts:
            break
        chunks = {i: slice(sequences[i].length, sequences[i].length + count) for i, count in counts.items()}
        batch = cache.batch([], [(sequences[i], count) for i, count in counts.items()])
        rows = torch.cat([hidden[i][chunk] for i, chunk in chunks.items()])
        positions = torch.cat([torch.from_numpy(asked[i].positions[:, chunk]) for i, chunk in chunks.items()], dim=1)
        out = model.decoder.logits(model.decoder.forward(rows, positions, batch))
        for i, part in zip(counts, out.split(list(counts.values())), strict=True):
            found[i].append(part)
    for name, parts in zip(golden.prompts, found, strict=True):
        expected = golden.expected[f"prompt.{name}.logits"]
        assert largest_difference(torch.cat(parts)[-len(expected) :], expected) <= 1e-4, name


def test_the_fixtures_say_what_the_tests_need() -> None:
    assert DENSE.model.decoder.feature_levels and MIXTURE.model.decoder.feature_levels
    assert DENSE.videos and MIXTURE.videos
