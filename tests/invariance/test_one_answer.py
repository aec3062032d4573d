"""One answer: whatever the engine does with a request, it gets the tokens of the network on its whole sequence."""

from dataclasses import replace

import numpy as np
import pytest
from engine_helpers import Service, greedy, request_of
from network_helpers import make_prompt, run_oracle

BOUND = 1e-4  # of fp32 logits
PARTS = {
    "text": [70],
    "one image": [5, (12, 15), 30],
    "three images": [3, (9, 9), (6, 12), 20, (12, 6), 2],
    "span longer than the window": [9, (18, 21), 4],
}
CHUNKS = (1, 3, 17, 64, 128, 512)


@pytest.fixture(scope="module")
def model(tiny_models):
    return tiny_models(ratios=(0, 4, 16, 4))


@pytest.fixture(scope="module")
def prompts(model):
    return {name: make_prompt(parts, model.config.vocab_size, seed) for seed, (name, parts) in enumerate(PARTS.items())}


@pytest.fixture(scope="module")
def expected(model, prompts):
    return {name: greedy(model, prompt) for name, prompt in prompts.items()}


def check(service, ids, outputs, names, expected):
    for request_id, output, name in zip(ids, outputs, names, strict=True):
        tokens, logits = expected[name]
        assert output.token_ids == tuple(tokens), name
        found = np.stack([row.numpy() for row in service.logits[request_id][-len(tokens) :]])
        assert np.abs(found - logits).max() < BOUND, name


def test_expected_logits_are_those_of_the_oracle(model, prompts, expected):
    for name, prompt in prompts.items():
        first = run_oracle(model, prompt)["logits"][-1]
        assert np.abs(first - expected[name][1][0]).max() < BOUND


def preempting(service, ids, steps):
    """Take every request's blocks away before some steps."""

    def disturb(step):
        if step in steps:
            for request_id in ids:
                if not service.core.is_finished(request_id):
                    service.preempt(request_id)

    return disturb


@pytest.mark.parametrize("preempted", [(), (2,), (2, 4, 5, 9)])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_alone_with_any_chunk_cold_or_warm_preempted_or_not(model, prompts, expected, chunk, warm, preempted):
    for name, prompt in prompts.items():
        service = Service(model, chunk_tokens=chunk)
        if warm:
            service.finish(service.core.add(request_of(prompt, name, max_tokens=1)))
        ids = service.core.add(request_of(prompt, name))
        outputs = service.finish(ids, preempting(service, ids, preempted))
        assert (outputs[0].num_cached_tokens > 0) == (warm and has_boundary(prompt)), name
        check(service, ids, outputs, [name], expected)


def has_boundary(prompt):
    inside = {p for span in prompt.spans for p in range(span.offset + 1, span.last + 1)}
    return any(boundary not in inside for boundary in range(16, len(prompt), 16))


@pytest.mark.parametrize("preempted", [(), (1, 3, 6)])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_in_a_batch_of_eight(model, prompts, expected, chunk, warm, preempted):
    service = Service(model, chunk_tokens=chunk, num_blocks=90)
    names = [*prompts, *prompts]
    if warm:
        service.finish([i for name in prompts for i in service.core.add(request_of(prompts[name], name, max_tokens=1))])
    ids = [i for name in names for i in service.core.add(request_of(prompts[name], name))]
    check(service, ids, service.finish(ids, preempting(service, ids[::2], preempted)), names, expected)


def test_with_so_few_blocks_that_requests_push_each_other_out(model, prompts, expected):
    service = Service(model, num_blocks=12, max_model_len=120, chunk_tokens=17)
    names = [*prompts, *prompts]
    ids = [i for name in names for i in service.core.add(request_of(prompts[name], name))]
    check(service, ids, service.finish(ids), names, expected)


@pytest.mark.parametrize("name", ["one image", "three images"])
def test_warm_prefix_of_every_length(model, prompts, name):
    """Every boundary and both sides of each span: a prompt that ends there, after one that goes on."""
    prompt = prompts[name]
    service = Service(model, max_num_seqs=1)
    service.finish(service.core.add(request_of(prompt, name, max_tokens=1)))
    ends = {16, 17, 32, 33, 48, 49, *(e for s in prompt.spans for e in (s.offset, s.offset + 1, s.last, s.last + 1))}
    inside = {p for span in prompt.spans for p in range(span.offset + 1, span.last + 1)}
    for end in sorted(ends - inside):
        if not 0 < end <= len(prompt):
            continue
        spans = tuple(span for span in prompt.spans if span.last < end)
        shorter = type(prompt)(
            ids=prompt.ids[:end], kinds=prompt.kinds[:end], spans=spans, images=prompt.images[: len(spans)]
        )
        ids = service.core.add(request_of(shorter, name))
        check(service, ids, service.finish(ids), [end], {end: greedy(model, shorter)})


PAIRS = {  # of prompts that share something, by their parts; the seed fixes text and pictures
    "same image, other text": ([20, (9, 9), 20], [20, (9, 9), 31]),
    "image moved by one": ([20, (9, 9), 20], [21, (9, 9), 20]),
    "image moved by three": ([20, (9, 9), 20], [23, (9, 9), 20]),
    "another turn": ([40, (6, 12), 20], [40, (6, 12), 20, 30]),
}


@pytest.mark.parametrize("name", PAIRS)
def test_prefix_cache_on_equals_off(model, name):
    """Contract 5.13: what a first prompt left behind never changes the answer to a second one."""
    prompts = [make_prompt(parts, model.config.vocab_size, seed=4) for parts in PAIRS[name]]
    service = Service(model)
    for number, prompt in enumerate(replace(prompt, images=prompts[0].images) for prompt in prompts):
        ids = service.core.add(request_of(prompt, "same"))
        check(service, ids, service.finish(ids), [number], {number: greedy(model, prompt)})


def test_two_images_of_one_size_are_not_mistaken_for_each_other(model):
    first, second = (make_prompt([20, (9, 9), 20], model.config.vocab_size, seed) for seed in (5, 6))
    second = replace(first, images=second.images)
    service = Service(model)
    for number, prompt in enumerate((first, second, first)):
        ids = service.core.add(request_of(prompt, f"picture {number % 2} "))
        check(service, ids, service.finish(ids), [number], {number: greedy(model, prompt)})


def test_third_use_of_an_image_encodes_nothing(model, prompts):
    service, encoded = Service(model), []
    encode = service.runner._network.encode_images

    def spy(patches, grids):
        encoded.extend(grids)
        return encode(patches, grids)

    service.runner._network.encode_images = spy
    try:
        for _ in range(3):
            service.finish(service.core.add(request_of(prompts["one image"], "same")))
    finally:
        del service.runner._network.encode_images
    assert len(encoded) == 1


def test_choices_share_the_prompt_and_draw_from_their_own_streams(model, prompts):
    service = Service(model)
    ids = service.core.add(request_of(prompts["one image"], n=3, temperature=1.0, seed=7))
    outputs = service.finish(ids)
    assert len({output.token_ids for output in outputs}) == 3
    assert [output.num_cached_tokens for output in outputs] == [0, 48, 48]
    alone = service.core.add(request_of(prompts["one image"], temperature=1.0, seed=7))
    assert service.finish(alone)[0].token_ids == outputs[0].token_ids


def test_prompt_logprobs_are_those_of_the_whole_sequence(model, prompts):
    from network_helpers import batch_of, logits_of

    prompt = prompts["one image"]
    service = Service(model, chunk_tokens=17)
    service.finish(service.core.add(request_of(prompt, "x")))
    ids = service.core.add(request_of(prompt, "x", prompt_logprobs=2, logprobs=1))
    output = service.finish(ids, preempting(service, ids, (2,)))[0]
    logits = logits_of(model.network, batch_of(model, [prompt])).astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    assert len(output.prompt_logprobs) == len(prompt) - 1
    for position, found in enumerate(output.prompt_logprobs, start=1):
        assert found.token_id == prompt.ids[position]
        assert found.logprob == pytest.approx(logprobs[position - 1, prompt.ids[position]], abs=1e-4)
        assert [token for token, _ in found.top] == np.argsort(-logprobs[position - 1], kind="stable")[:2].tolist()
    assert [one.token_id for one in output.logprobs] == list(output.token_ids)
    assert all(one.rank == 1 and one.top[0] == (one.token_id, one.logprob) for one in output.logprobs)
