"""Laws of the network that hold whatever the weights: borders of visibility, rotary shifts, routing, and perturbations.

A perturbation changes one row's input and asks which rows' streams move. With one layer the answer is a set that can be
written down, so both directions are tested: nothing moves that must not, and everything moves that must.
"""

import dataclasses
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from network_helpers import Prompt, TinyModel, batch_of, encode, last_streams, logits_of, make_prompt, sequence
from oracle import layout

from deepspan.core.media import TokenKind
from deepspan.model.batch import ForwardBatch
from deepspan.model.network import DeepseekV4
from deepspan.ops.registry import reference_ops
from deepspan.runtime.batch_builder import build_batch

MOVED = 5e-5  # streams are of size 1; a row that sees nothing of a change differs by rounding at most
WINDOW = 8
MIXED = [9, (12, 15), 20, (6, 6), (6, 9), 45]  # adjacent images in the middle; text reaches far beyond all of them


def one_layer(tiny_models, ratio: int, window: int, **fields) -> TinyModel:
    """No hash layer (ids act through the embedding only) and room for all entries."""
    return tiny_models(ratios=(ratio,), sliding_window=window, num_hash_layers=0, index_topk=512, **fields)


def features_of(model: TinyModel, prompt: Prompt) -> torch.Tensor | None:
    with torch.no_grad():
        return encode(model.network, prompt)


def perturbed(model: TinyModel, prompt: Prompt, features: torch.Tensor | None, position: int) -> ForwardBatch:
    """The batch with another token at a TEXT position, or another feature row at an IMAGE position."""
    inputs = sequence(prompt, features)
    if prompt.kinds[position] == TokenKind.TEXT:
        ids = prompt.ids.copy()
        ids[position] = (ids[position] + 1) % model.config.vocab_size
        inputs = dataclasses.replace(inputs, token_ids=ids)
    else:
        assert prompt.kinds[position] == TokenKind.IMAGE
        index = int(np.count_nonzero(prompt.kinds[:position] == TokenKind.IMAGE))
        changed = features.clone()
        changed[index] = -changed[index]
        inputs = dataclasses.replace(inputs, features=changed)
    return build_batch([inputs], model.config, "cpu")


def moved_rows(network: DeepseekV4, before: ForwardBatch, after: ForwardBatch) -> set[int]:
    return rows_apart(last_streams(network, before), last_streams(network, after))


def rows_apart(before: np.ndarray, after: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.abs(after - before).max(axis=1) > MOVED).tolist())


class Perturber:
    """One prompt on one network: which rows move if one position changes."""

    def __init__(self, model: TinyModel, prompt: Prompt, network: DeepseekV4 | None = None) -> None:
        self._model, self._prompt, self._network = model, prompt, network or model.network
        self._features = features_of(model, prompt)
        self._before = last_streams(self._network, build_batch([sequence(prompt, self._features)], model.config, "cpu"))

    def rows_moved_by(self, position: int) -> set[int]:
        after = perturbed(self._model, self._prompt, self._features, position)
        return rows_apart(self._before, last_streams(self._network, after))


def changeable(prompt: Prompt) -> list[int]:
    return np.flatnonzero(np.isin(prompt.kinds, (TokenKind.TEXT, TokenKind.IMAGE))).tolist()


def bounds(prompt: Prompt) -> list[tuple[int, int]]:
    return [(span.first, span.last) for span in prompt.spans]


def seeing_raw(prompt: Prompt, window: int, position: int) -> set[int]:
    return {q for q in range(len(prompt)) if position in layout.raw_visible(q, window, bounds(prompt))}


def seeing_entry(prompt: Prompt, ratio: int, position: int) -> set[int]:
    """Rows that see the first entry which pools the position (later ones are seen by fewer)."""
    return {q for q in range(len(prompt)) if ratio and position // ratio in layout.entries_visible(q, ratio)}


def text(model: TinyModel, num_tokens: int, seed: int = 0) -> Prompt:
    return make_prompt([num_tokens], model.config.vocab_size, seed)


# --- borders ----------------------------------------------------------------------------------------------------


def test_first_token_attends_to_itself_and_sink_only(tiny_models):
    model = tiny_models()
    calls = []

    def spy(q, rows, row_lo, row_hi, entries, entry_hi, selected, sink, scale, blocks):
        out = reference_ops().sparse_attention(
            q, rows, row_lo, row_hi, entries, entry_hi, selected, sink, scale, blocks
        )
        calls.append((q, rows.rows, entries, sink, scale, out))
        return out

    logits_of(model.with_ops(sparse_attention=spy), batch_of(model, [text(model, 1)]))
    assert len(calls) == len(model.config.compress_ratios)
    for q, rows, entries, sink, scale, out in calls:
        assert entries is None or len(entries.rows) == 0
        share = torch.sigmoid((q[0] @ rows[0]) * scale - sink)  # of the row itself; the rest goes to the sink
        assert torch.allclose(out[0], share[:, None] * rows[0], atol=1e-6)


@pytest.mark.parametrize("ratio", [4, 16, 128])
def test_entry_moves_rows_exactly_from_last_token_of_its_group(tiny_models, ratio):
    """With a window of one token only entries carry anything to other rows."""
    model = one_layer(tiny_models, ratio, window=1, vision=False)
    prompt = text(model, 2 * ratio + 3)
    perturber = Perturber(model, prompt)
    everything = set(range(len(prompt)))
    for position, border in ((0, ratio - 1), (ratio - 1, ratio - 1), (ratio, 2 * ratio - 1), (2 * ratio, len(prompt))):
        expected = {position} | {row for row in everything if row >= border}
        assert perturber.rows_moved_by(position) == expected, position


def test_window_at_128_drops_token_0_and_keeps_token_1(tiny_models):
    model = one_layer(tiny_models, 0, window=128, vision=False)
    perturber = Perturber(model, text(model, 132))
    assert perturber.rows_moved_by(0) == set(range(128))
    assert perturber.rows_moved_by(1) == set(range(1, 129))


@pytest.mark.parametrize(("ratio", "reach"), [(4, 2), (16, 1)])
def test_token_is_pooled_by_its_group_and_with_overlap_by_the_next(tiny_models, ratio, reach):
    """Hence entry 0 of ratio 4 pools 4 rows and every other 8."""
    model = one_layer(tiny_models, ratio, window=1, vision=False)
    prompt = text(model, 4 * ratio)

    def entries(batch: ForwardBatch) -> torch.Tensor:
        pooled = []

        def spy(*args):
            pooled.append(reference_ops().compress_groups(*args))
            return pooled[-1]

        logits_of(model.with_ops(compress_groups=spy), batch)
        return pooled[0]

    before = entries(batch_of(model, [prompt]))
    for position in range(0, 3 * ratio, max(1, ratio // 4)):
        moved = (entries(perturbed(model, prompt, None, position)) - before).abs().amax(dim=1) > MOVED
        first = position // ratio
        assert np.flatnonzero(moved.numpy()).tolist() == list(range(first, min(first + reach, 4)))


# --- rotary positions -------------------------------------------------------------------------------------------


def shifted(batch: ForwardBatch, shift: int) -> ForwardBatch:
    compressed = {
        ratio: dataclasses.replace(meta, positions=meta.positions + shift)
        for ratio, meta in batch.attention.compressed.items()
    }
    attention = dataclasses.replace(batch.attention, compressed=compressed)
    return dataclasses.replace(batch, positions=batch.positions + shift, attention=attention)


@pytest.mark.parametrize("shift", [128, 1280])
@pytest.mark.parametrize("parts", [[200], [10, (12, 15), 60]], ids=["text", "image"])
def test_logits_with_shifted_positions_are_unchanged(tiny_models, parts, shift):
    model = tiny_models()
    batch = batch_of(model, [make_prompt(parts, model.config.vocab_size, seed=3)])
    difference = np.abs(logits_of(model.network, batch) - logits_of(model.network, shifted(batch, shift)))
    assert difference.max() < 2e-4


def test_logits_with_shifted_positions_need_the_inverse_rotation(tiny_models):
    """The law above has teeth: it fails at once if the output is not rotated back."""
    model = tiny_models()
    batch = batch_of(model, [text(model, 60)])

    def forward_only(x, cos, sin, inverse=False):
        return x if inverse else reference_ops().apply_rope(x, cos, sin)

    broken = model.with_ops(apply_rope=forward_only)
    assert np.abs(logits_of(broken, batch) - logits_of(broken, shifted(batch, 128))).max() > 1e-2


# --- routing ----------------------------------------------------------------------------------------------------


def ffn_output(network: DeepseekV4, layer: int, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
    with torch.no_grad():
        return network.layers[layer].ffn(x, batch)


def test_hash_layer_depends_on_ids_through_expert_choice_only(tiny_models):
    model = tiny_models()
    network = model.with_ops()
    first, same, other = 10, 11, 12
    table = network.layers[0].ffn.gate.tid2eid
    table[first], table[same], table[other] = torch.tensor([0, 1]), torch.tensor([0, 1]), torch.tensor([2, 3])
    x = torch.randn(4, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    kinds = np.full(4, TokenKind.TEXT, dtype=np.int8)
    outputs = []
    for token in (first, same, other):
        batch = batch_of(model, [Prompt(ids=np.full(4, token), kinds=kinds, spans=(), images=())])
        outputs.append([ffn_output(network, layer, x, batch) for layer in range(2)])
    assert torch.equal(outputs[0][0], outputs[1][0])
    assert float((outputs[0][0] - outputs[2][0]).abs().max()) > 1e-2
    assert torch.equal(outputs[0][1], outputs[2][1])  # a scored layer never looks at ids


def test_expert_weights_of_every_layer_sum_to_scaling(tiny_models):
    model = tiny_models(num_hash_layers=2)
    sums = []

    def spy(*args):
        experts, weights = reference_ops().route(*args)
        sums.append(weights.sum(-1))
        return experts, weights

    logits_of(model.with_ops(route=spy), batch_of(model, [make_prompt(MIXED, model.config.vocab_size, 0)]))
    assert len(sums) == len(model.config.compress_ratios)
    assert float((torch.stack(sums) - 1.5).abs().max()) < 1e-5


def test_ids_of_image_rows_have_no_effect(tiny_models):
    """They are sentinels or anything else; rows are told by kind, in hash layers too."""
    model = tiny_models(num_hash_layers=2)
    batch = batch_of(model, [make_prompt(MIXED, model.config.vocab_size, 0)])
    sentinels = torch.where(batch.kinds == TokenKind.TEXT, batch.token_ids, 129257 + batch.kinds)
    replaced = dataclasses.replace(batch, token_ids=sentinels)
    assert np.array_equal(logits_of(model.network, batch), logits_of(model.network, replaced))


def test_text_prompt_on_vision_model_is_bit_equal_to_text_only_model(tiny_models):
    vision, plain = tiny_models(seed=5), tiny_models(seed=5, vision=False)
    prompt = text(plain, 150)
    found, expected = (logits_of(model.network, batch_of(model, [prompt])) for model in (vision, plain))
    assert np.array_equal(found, expected)


# --- perturbations: one layer, exact sets -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixed_prompt(tiny_models) -> Prompt:
    return make_prompt(MIXED, one_layer(tiny_models, 0, WINDOW).config.vocab_size, seed=1)


@pytest.mark.parametrize("ratio", [0, 4, 16])
def test_one_layer_moves_exactly_the_rows_that_see_a_changed_row(tiny_models, mixed_prompt, ratio):
    """Window united with the own span, and entries from the end of their group on; nothing else.

    Text behind an image therefore sees it through its window and through entries: with ratio 0 it forgets it.
    """
    perturber = Perturber(one_layer(tiny_models, ratio, WINDOW), mixed_prompt)

    @settings(max_examples=20, deadline=None, derandomize=True)
    @given(st.sampled_from(changeable(mixed_prompt)))
    def check(position: int) -> None:
        expected = seeing_raw(mixed_prompt, WINDOW, position) | seeing_entry(mixed_prompt, ratio, position)
        assert perturber.rows_moved_by(position) == expected

    check()


@pytest.mark.parametrize("ratio", [4, 16])
def test_entries_stay_causal_for_image_rows(tiny_models, mixed_prompt, ratio):
    """With raw rows taken away, a change inside a span no longer reaches the rows before it."""
    model = one_layer(tiny_models, ratio, WINDOW)

    def entries_only(q, rows, row_lo, row_hi, *rest):
        return reference_ops().sparse_attention(q, rows, row_hi + 1, row_hi, *rest)

    perturber = Perturber(model, mixed_prompt, model.with_ops(sparse_attention=entries_only))
    image_positions = np.flatnonzero(mixed_prompt.kinds == TokenKind.IMAGE).tolist()

    @settings(max_examples=12, deadline=None, derandomize=True)
    @given(st.sampled_from(image_positions))
    def check(position: int) -> None:
        expected = {position} | seeing_entry(mixed_prompt, ratio, position)
        assert perturber.rows_moved_by(position) == expected

    check()


def test_indexer_of_image_rows_selects_causal_entries_only(tiny_models, mixed_prompt):
    model = tiny_models(ratios=(4, 4), sliding_window=WINDOW, index_topk=5)
    selections = []

    def spy(*args):
        selections.append(reference_ops().index_entries(*args))
        return selections[-1]

    logits_of(model.with_ops(index_entries=spy), batch_of(model, [mixed_prompt]))
    assert len(selections) == 2
    for selected in selections:
        for query, entries in enumerate(selected.tolist()):
            chosen = {entry for entry in entries if entry >= 0}
            assert chosen <= layout.entries_visible(query, 4)
            assert len(chosen) == min(5, (query + 1) // 4)


# --- perturbations: the whole network ---------------------------------------------------------------------------


def rows_that_may_not_move(prompt: Prompt, first_changed: int) -> set[int]:
    """Rows that see nothing from `first_changed` on. Those they see see no farther, so depth adds nothing."""
    return {q for q in range(len(prompt)) if max(layout.raw_visible(q, WINDOW, bounds(prompt))) < first_changed}


def own_span(prompt: Prompt, position: int) -> set[int]:
    return next((set(range(a, b + 1)) for a, b in bounds(prompt) if a <= position <= b), {position})


@pytest.mark.parametrize("ratios", [(0, 4, 128, 4), (4, 0, 16, 4)])
def test_later_token_never_moves_rows_that_do_not_see_it(tiny_models, mixed_prompt, ratios):
    """Through all layers, the indexer's choices included; rows of the same span do move, earlier ones too."""
    perturber = Perturber(tiny_models(ratios=ratios, sliding_window=WINDOW), mixed_prompt)

    @settings(max_examples=12, deadline=None, derandomize=True)
    @given(st.sampled_from(changeable(mixed_prompt)))
    def check(position: int) -> None:
        moved = perturber.rows_moved_by(position)
        assert not moved & rows_that_may_not_move(mixed_prompt, position)
        assert own_span(mixed_prompt, position) <= moved

    check()


def with_other_pixel(prompt: Prompt, image: int, patch: int, value: int) -> Prompt:
    images = list(prompt.images)
    patches, rows, cols = images[image]
    patches = patches.copy()
    patches[patch, value] = -patches[patch, value] - 1
    images[image] = (patches, rows, cols)
    return dataclasses.replace(prompt, images=tuple(images))


@pytest.mark.parametrize(("image", "patch"), [(0, 0), (0, 179), (1, 20), (2, 53)])
def test_pixel_moves_its_whole_span_and_nothing_before_it(tiny_models, mixed_prompt, image, patch):
    """Earlier text, earlier images and the lead pads of its own block stay; START already sees the last pixel."""
    model = tiny_models(sliding_window=WINDOW)
    before = batch_of(model, [mixed_prompt])
    after = batch_of(model, [with_other_pixel(mixed_prompt, image, patch, value=5)])
    moved = moved_rows(model.network, before, after)
    span = mixed_prompt.spans[image]
    assert not moved & set(range(span.first))
    assert set(range(span.first, span.last + 1)) <= moved
    assert span.last + 1 in moved  # text or pads behind it see its end


def test_pixel_of_one_image_leaves_features_of_the_others(tiny_models, mixed_prompt):
    model = tiny_models(sliding_window=WINDOW)
    before, after = (features_of(model, prompt) for prompt in (mixed_prompt, with_other_pixel(mixed_prompt, 1, 20, 5)))
    moved = set(np.flatnonzero(((before - after).abs().amax(dim=1) > MOVED).numpy()).tolist())
    assert moved == set(range(20, 24))  # 4 x 5 cells, then all 2 x 2 cells of the changed image, then 2 x 3


def lead_pads(prompt: Prompt) -> Iterable[int]:
    return (position for span in prompt.spans for position in range(span.offset, span.first))


def test_lead_pads_are_outside_the_span_they_announce(tiny_models, mixed_prompt):
    perturber = Perturber(one_layer(tiny_models, 0, WINDOW), mixed_prompt)
    pads = list(lead_pads(mixed_prompt))
    assert pads
    first_images = [mixed_prompt.kinds.tolist().index(TokenKind.IMAGE, span.first) for span in mixed_prompt.spans]
    for span, position in zip(mixed_prompt.spans, first_images, strict=True):
        moved = perturber.rows_moved_by(position)
        assert not moved & set(range(span.offset, span.first))
        assert {span.first, span.last} <= moved


def test_sequence_in_batch_is_not_moved_by_its_neighbours(tiny_models, mixed_prompt):
    model = tiny_models(ratios=(4, 0, 16, 4), sliding_window=WINDOW)
    other = make_prompt([5, (6, 6), 30], model.config.vocab_size, seed=9)
    changed = make_prompt([5, (6, 6), 30], model.config.vocab_size, seed=10)
    before, after = (batch_of(model, [first, mixed_prompt, first]) for first in (other, changed))
    inside = set(range(len(other), len(other) + len(mixed_prompt)))
    assert not moved_rows(model.network, before, after) & inside
