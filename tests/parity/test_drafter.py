"""The draft stages as the engine runs them, from caches, against the oracle's dense statement of one block of slots."""

import numpy as np
import pytest
import torch
from engine_helpers import Service, greedy, request_of
from network_helpers import NEAR_TIE, make_prompt, relative_error, run_oracle, smallest_margin
from oracle import drafter as oracle_drafter

TOLERANCE = 1e-5  # of the largest value
PROMPTS = {
    "first token": [1],
    "shorter than the window": [9],
    "as long as the window": [16],
    "one longer": [17],
    "many blocks": [70],
    "image in the window": [30, (6, 6), 3],
    "image over the window's edge": [12, (9, 9), 4],
    "image last": [40, (6, 12)],
}


@pytest.fixture(scope="module")
def model(tiny_models):
    return tiny_models(ratios=(0, 4, 16, 4), draft_stages=3)


class Blocks:
    """What the stages computed for each block of slots of one request: anchor's position, and both their outputs."""

    def __init__(self, service):
        self.found = []
        drafter = service.runner._drafting._drafter
        forward = drafter.forward

        def spy(batch, target):
            logits, hidden = forward(batch, target)
            for part in batch.parts:
                rows = slice(part.first, part.last)
                self.found.append((part.start, logits[rows].numpy().copy(), hidden[rows].numpy().copy()))
            return logits, hidden

        drafter.forward = spy
        self.close = lambda: drafter.__dict__.pop("forward")


def run(model, prompts, num_drafts, new, **options):
    """(outputs, blocks) of a service whose stages guess."""
    service = Service(model, draft_method="dspark", num_drafts=num_drafts, **options)
    blocks = Blocks(service)
    try:
        ids = [
            i for n, prompt in enumerate(prompts) for i in service.core.add(request_of(prompt, f"{n}", max_tokens=new))
        ]
        return service.finish(ids), blocks.found
    finally:
        blocks.close()


def dense(model, prompt, tokens, position, num_slots):
    """The oracle's block of slots at `position`, whose token is the last of what is known; its target result too."""
    new = position - len(prompt)
    known = type(prompt)(
        ids=np.concatenate((prompt.ids, tokens[:new])).astype(np.int64),
        kinds=np.concatenate((prompt.kinds, np.full(new, -1, dtype=np.int8))),
        spans=prompt.spans,
        images=prompt.images,
    )
    target = run_oracle(model, known)
    return oracle_drafter.draft(model.raw, model.weights, target["streams"], tokens[new], num_slots), target


@pytest.mark.parametrize("name", PROMPTS)
def test_first_block_of_slots_equals_oracle(model, name):
    prompt = make_prompt(PROMPTS[name], model.config.vocab_size, seed=4)
    for num_drafts in (1, 5) if name != "many blocks" else (2, 5, 8):
        outputs, blocks = run(model, [prompt], num_drafts, new=num_drafts + 2)
        position, logits, hidden = blocks[0]
        assert position == len(prompt)
        expected, target = dense(model, prompt, outputs[0].token_ids, position, num_drafts)
        assert min(smallest_margin(target), *expected["router_margins"].min(axis=1)) > NEAR_TIE
        assert relative_error(logits, expected["base"]) < TOLERANCE
        assert relative_error(hidden, expected["hidden"]) < TOLERANCE
        assert expected["base"].std() > 0.3  # not a comparison of zeros


def test_blocks_along_a_text_equal_oracle(model):
    """Context kept while decoding, some of it over the slots of earlier blocks; a prompt that came in chunks."""
    prompt = make_prompt([41], model.config.vocab_size, seed=6)
    outputs, blocks = run(model, [prompt], 5, new=30, chunk_tokens=7)
    assert len(blocks) > 15
    for position, logits, _ in blocks[1::6]:
        expected, _ = dense(model, prompt, outputs[0].token_ids, position, len(logits))
        assert relative_error(logits, expected["base"]) < TOLERANCE


def test_guesses_are_those_of_the_oracle_and_follow_each_other(model, monkeypatch):
    """With a Markov head that has a say: each guess is the likeliest behind the one before it."""
    prompt = make_prompt([20], model.config.vocab_size, seed=8)
    stronger, name = 8.0, f"mtp.{model.drafter.num_stages - 1}.markov_head.markov_w2.weight"
    weight = model.drafter.markov.markov_w2.weight
    monkeypatch.setitem(model.weights, name, stronger * model.weights[name])
    service = Service(model, draft_method="dspark", num_drafts=6)
    propose, guessed = service.runner._drafting.propose, []
    monkeypatch.setattr(
        service.runner._drafting, "propose", lambda anchors: guessed.append(propose(anchors)) or guessed[-1]
    )
    weight.mul_(stronger)
    try:
        outputs = service.finish(service.core.add(request_of(prompt, max_tokens=9)))
    finally:
        weight.div_(stronger)
    expected, _ = dense(model, prompt, outputs[0].token_ids, len(prompt), 6)
    assert list(guessed[0][0].tokens) == expected["tokens"]
    alone = expected["base"].argmax(axis=1).tolist()
    assert sum(one != other for one, other in zip(expected["tokens"], alone, strict=True)) > 2


def test_confidence_equals_oracle(model):
    prompt = make_prompt([20], model.config.vocab_size, seed=8)
    outputs, blocks = run(model, [prompt], 6, new=9)
    expected, _ = dense(model, prompt, outputs[0].token_ids, len(prompt), 6)
    before = torch.tensor([outputs[0].token_ids[0], *expected["tokens"][:-1]])
    with torch.no_grad():
        rows = model.drafter.markov.markov_w1(before)
        found = model.drafter.confidence(torch.from_numpy(blocks[0][2]), rows)
    assert np.abs(torch.sigmoid(found).numpy() - expected["confidence"]).max() < TOLERANCE


def test_neighbours_change_nothing_of_a_block(model):
    prompts = [make_prompt(PROMPTS[name], model.config.vocab_size, seed=4) for name in PROMPTS]
    _, together = run(model, prompts, 4, new=6, num_blocks=90)
    for number in (1, 5):
        _, alone = run(model, [prompts[number]], 4, new=6)
        position, logits, _ = alone[0]
        found = min(np.abs(rows - logits).max() for at, rows, _ in together if at == position and len(rows) == 4)
        assert found < 1e-4


# --- laws of one block


@pytest.fixture(scope="module")
def streams(model):
    return run_oracle(model, make_prompt([40], model.config.vocab_size, seed=2))["streams"]


def moved(model, streams, change):
    """How far the block of slots moves with a change of the streams of some rows."""
    other = [layer.copy() for layer in streams]
    change(other)
    before, after = (oracle_drafter.draft(model.raw, model.weights, given, 7, 3)["base"] for given in (streams, other))
    return np.abs(after - before).max(axis=1)


@pytest.mark.parametrize(("row", "is_seen"), [(39, True), (24, True), (23, False), (0, False)])
def test_all_slots_see_exactly_the_window_before_the_anchor(model, streams, row, is_seen):
    def change(layers):
        for layer in layers:
            layer[row] += 1.0

    assert (moved(model, streams, change) > 1e-6).all() == is_seen
    assert (moved(model, streams, change) > 0).any() == is_seen


@pytest.mark.parametrize(("layer", "is_used"), [(0, False), (1, True), (2, True), (3, True)])
def test_context_is_the_mean_of_the_streams_of_the_target_layers(model, streams, layer, is_used):
    assert (moved(model, streams, lambda layers: layers[layer].__iadd__(0.5)) > 1e-6).all() == is_used
    # What the mean does not see is not seen.
    swing = np.array([0.5, -0.5, 0.25, -0.25])[:, None]
    assert (moved(model, streams, lambda layers: layers[layer].__iadd__(swing)) < 1e-9).all()


def test_bias_of_image_rows_never_acts_in_the_stages(model):
    prompt = make_prompt(PROMPTS["image in the window"], model.config.vocab_size, seed=4)
    _, before = run(model, [prompt], 3, new=5)
    gates = [stage.ffn.gate for stage in model.drafter.mtp]
    kept = [gate.bias_vl.clone() for gate in gates]
    for gate in gates:
        gate.bias_vl += 100 * torch.arange(len(gate.bias_vl))
    try:
        _, after = run(model, [prompt], 3, new=5)
    finally:
        for gate, bias in zip(gates, kept, strict=True):
            gate.bias_vl.copy_(bias)
    for (_, one, _), (_, other, _) in zip(before, after, strict=True):
        assert np.array_equal(one, other)


def test_guesses_leave_the_text_as_it_is(model):
    prompt = make_prompt([41], model.config.vocab_size, seed=6)
    outputs, _ = run(model, [prompt], 5, new=12)
    assert list(outputs[0].token_ids) == greedy(model, prompt, 12)[0]
