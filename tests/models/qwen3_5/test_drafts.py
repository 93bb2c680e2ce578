"""Drafts of Qwen3.5: the drafter's outputs and speculation steps over pending tokens, as the fixtures trace them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from models.interfaces.capturable import BufferSpec
from models.layers.kv_cache import PagedBatch, StateRows
from models.protocol import Decoder
from models.qwen_vl.v3_5.model import load_model
from tests.models.families.family import CPU, FAMILIES, Family
from tests.support.audit import audited_verify
from tests.support.chat_golden import golden_prompt, largest_difference, prompt_rows
from tests.support.inference import no_gradients as no_gradients
from tests.support.paged import PagedCache, PagedSequence

DRAFTS = 3
HIDDEN_TOLERANCE, LOGITS_TOLERANCE = 4e-4, 2e-4


@dataclass
class Speculation:
    """One sequence in slot 1, advanced by steps of the last token and DRAFTS drafts."""

    decoder: Decoder
    cache: PagedCache
    sequence: PagedSequence
    position: int
    """Rotary position of the next token less its KV position."""
    pending: int = 0
    inputs: list[dict[str, Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        self.inputs = [
            {name: torch.full((2, *spec.shape), torch.nan, dtype=spec.dtype) for name, spec in layer.items()}
            for layer in self.decoder.pending_specs(1 + DRAFTS)
        ]

    def positions(self, first: int, count: int) -> Tensor:
        return torch.arange(first, first + count).expand(self.decoder.position_axes, -1) + self.position

    def states(self, read: int, write: int) -> StateRows:
        places = (torch.tensor([value]) for value in (read, write))
        slots, pending = torch.tensor([1]), torch.tensor([self.pending])
        return StateRows(self.cache.states, *places, inputs=self.inputs, slots=slots, pending=pending)

    def batch(self, count: int, write: int) -> PagedBatch:
        """The next `count` tokens."""
        cache, sequence, first = self.cache, self.sequence, self.sequence.length
        return PagedBatch(
            cache.caches,
            cache.page_size,
            torch.tensor(cache.rows(sequence, first, first + count)),
            cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32),
            prefill_tables=torch.tensor([sequence.pages], dtype=torch.int32),
            prefill_lens=torch.tensor([first + count], dtype=torch.int32),
            states=self.states(sequence.row, write),
        )

    def drafts(self, predicted: Tensor) -> tuple[list[int], Tensor]:
        """From the drafter's output [1, H] for the token in front of the next one: ids and logits [DRAFTS, V]."""
        assert self.decoder.drafter is not None
        cache, sequence = self.cache, self.sequence
        logits, ids = [self.decoder.logits(predicted)], []
        for place in range(sequence.length, sequence.length + DRAFTS - 1):
            ids.append(int(logits[-1].argmax()))
            batch = PagedBatch(
                cache.caches,
                cache.page_size,
                torch.tensor(cache.rows(sequence, place, place + 1)),
                torch.tensor([sequence.pages], dtype=torch.int32),
                torch.tensor([place + 1], dtype=torch.int32),
            )
            embedding = self.decoder.embed(torch.tensor(ids[-1:]))
            predicted = self.decoder.drafter(predicted, embedding, self.positions(place, 1), batch)
            logits.append(self.decoder.logits(predicted))
        return [*ids, int(logits[-1].argmax())], torch.cat(logits)


@pytest.mark.parametrize("family", [FAMILIES["qwen3_5"], FAMILIES["qwen3_5_moe"]], ids=lambda family: family.name)
@pytest.mark.parametrize("name", ["text", "images", "long_text"])
def test_speculation_is_as_traced(family: Family, name: str) -> None:
    golden = {
        key.removeprefix(f"mtp.{name}."): value
        for key, value in family.expected.items()
        if key.startswith(f"mtp.{name}.")
    }
    model = load_model(family.directory, "cpu", torch.float32, drafter=True)
    decoder, prompt = model.decoder, golden_prompt(family.processor, family.directory, name)
    drafter, known = decoder.drafter, golden["tokens"].tolist()
    assert drafter is not None
    cache = PagedCache(decoder.cache_specs(), state_specs=decoder.state_specs())
    n = len(prompt.token_ids)
    sequence = cache.new_sequence(n + len(known) + 2 * DRAFTS)

    # The prompt: row i of the drafter has the embedding of token i + 1.
    embeddings, positions = prompt_rows(model, prompt, CPU), torch.from_numpy(prompt.positions)
    batch = cache.batch(prefills=[(sequence, n)])
    hidden = decoder.forward(embeddings, positions, batch)
    shifted = torch.cat((embeddings[1:], decoder.embed(torch.tensor(known[:1]))))
    predicted = drafter(hidden, shifted, positions, batch)
    rows = len(golden["prompt_hidden"])
    assert largest_difference(predicted[-rows:], golden["prompt_hidden"]) < HIDDEN_TOLERANCE
    written = {key: value.clone() for key, value in cache.caches[-1].items()}
    for values in cache.caches[-1].values():
        values.fill_(torch.nan)
    drafter.cache_keys(hidden, shifted, positions, batch)
    for key, value in written.items():
        slots = batch.slot_mapping
        assert torch.equal(cache.caches[-1][key][slots], value[slots])

    run = Speculation(decoder, cache, sequence, prompt.next_position - n)
    tokens, predicted = known[:1], predicted[-1:]
    for step, accepted in enumerate(golden["accepted"].tolist()):
        drafts, logits = run.drafts(predicted)
        assert drafts == golden["draft_ids"][step].tolist()
        assert largest_difference(logits, golden["draft_logits"][step]) < LOGITS_TOLERANCE
        batch, first = run.batch(1 + DRAFTS, sequence.row), sequence.length
        positions = run.positions(first, 1 + DRAFTS)
        hidden = decoder.forward(decoder.embed(torch.tensor([tokens[-1], *drafts])), positions, batch)
        sampled = decoder.logits(hidden).argmax(-1)
        new = sampled[: 1 + accepted].tolist()
        assert drafts[:accepted] == new[:accepted] and drafts[accepted : accepted + 1] != new[accepted:]
        if "verify_conv" in golden and step == 0:
            assert_states(run, golden["verify_conv"], golden["verify_recurrent"])
        predicted = drafter(hidden, decoder.embed(sampled), positions, batch)[accepted : accepted + 1]
        sequence.length += 1 + accepted
        run.pending, tokens = 1 + accepted, tokens + new
    assert tokens == known


def test_the_drafter_reads_no_value_on_the_host() -> None:
    decoder = load_model(FAMILIES["qwen3_5_moe"].directory, "cpu", torch.float32, drafter=True).decoder
    assert audited_verify(decoder, 2, 3) == BufferSpec((6, decoder.vocab_size), torch.float32)


def assert_states(run: Speculation, conv: Tensor, recurrent: Tensor) -> None:
    """The state of the last layer after each of the tokens that are pending."""
    held = [{name: value.clone() for name, value in layer.items()} for layer in run.inputs]
    for count, (expected_conv, expected_delta) in enumerate(zip(conv, recurrent, strict=True), 1):
        spare = run.sequence.row + 1
        run.pending = count
        token = run.decoder.embed(torch.tensor([0]))
        batch = replace(run.batch(1, spare), slot_mapping=torch.tensor([0]))
        run.decoder.forward(token, run.positions(run.sequence.length, 1), batch)
        layer = run.cache.states[-1]
        assert largest_difference(layer["conv"][spare].T, expected_conv) < HIDDEN_TOLERANCE
        assert largest_difference(layer["delta"][spare], expected_delta) < HIDDEN_TOLERANCE
        run.inputs = [{name: value.clone() for name, value in layer.items()} for layer in held]
