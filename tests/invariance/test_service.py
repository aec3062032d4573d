"""The service matrix of the runtime contracts (group 13), scaled down: relations, not absolute numbers."""

import numpy as np
import pytest
import torch
from engine_helpers import Service, greedy, request_of
from network_helpers import make_prompt

from deepspan.kv.capacity import in_flight_tokens, request_blocks
from deepspan.runtime.batch_builder import SequenceInput, build_batch

UNIT = 16  # tokens of a block


@pytest.fixture(scope="module")
def model(tiny_models):
    return tiny_models(ratios=(0, 4, 16, 4))


@pytest.mark.parametrize("length", [15, 16, 17, 79, 80, 81])
def test_prompt_sent_three_times_reuses_all_whole_blocks_but_the_last_token(model, length):
    prompt, service = make_prompt([length], model.config.vocab_size, seed=length), Service(model)
    for number in range(3):
        output = service.finish(service.core.add(request_of(prompt)))[0]
        assert output.num_cached_tokens == (0 if number == 0 else (length - 1) // UNIT * UNIT)
    assert service.core.stats().num_cached_tokens == 2 * ((length - 1) // UNIT * UNIT)


def test_image_behind_a_shared_prefix_is_computed_again_and_encoded_once(model):
    prompt, service = make_prompt([40, (12, 15), 9], model.config.vocab_size, seed=1), Service(model)
    expected = tuple(greedy(model, prompt)[0])
    encode, encoded = service.runner._encode_together, []
    service.runner._encode_together = lambda jobs: (encoded.extend(jobs), encode(jobs))
    span = prompt.spans[0]
    boundary = max(b for b in range(0, len(prompt), UNIT) if not span.offset < b <= span.last)
    for number in range(3):
        output = service.finish(service.core.add(request_of(prompt, "x")))[0]
        assert output.token_ids == expected
        assert output.num_cached_tokens == (boundary if number else 0)
    assert len(encoded) == 1


def test_fifteen_interleaved_requests_with_shared_pictures_and_duplicates(model):
    """Contract 13.17: several images, duplicates and plain text at once, with the prefix cache on."""
    kinds = [[20, (9, 9), 20], [35], [3, (6, 12), 20, (12, 6), 2], [20, (9, 9), 20], [50]]
    seeds = [1, 2, 3, 1, 4]
    prompts = [make_prompt(parts, model.config.vocab_size, seed) for parts, seed in zip(kinds, seeds, strict=True)]
    expected = [tuple(greedy(model, prompt)[0]) for prompt in prompts]
    service, rng = Service(model, num_blocks=40, chunk_tokens=17), np.random.default_rng(0)
    ids = []
    for number in range(15):
        ids += service.core.add(request_of(prompts[number % 5], f"picture {seeds[number % 5]} "))
        for _ in range(int(rng.integers(0, 4))):
            service.core.step()
            service.core.check()
    for number, output in enumerate(service.finish(ids)):
        assert output.token_ids == expected[number % 5]


@pytest.mark.parametrize(("length", "ratios"), [(131_072, (0, 128)), (16_384, (0, 4, 128))])
def test_long_request_completes_within_the_blocks_foreseen(tiny_models, length, ratios):
    """Contract 12.5: chunked prefill of 4096 and some decodes; the answer is that of the network on the whole."""
    new = 4
    small = {"hidden_size": 32, "head_dim": 16, "qk_rope_head_dim": 8, "num_attention_heads": 2}
    small |= {"index_n_heads": 1, "index_head_dim": 16, "index_topk": 16, "max_position_embeddings": length}
    model = tiny_models(ratios=ratios, vision=False, **small)
    prompt = make_prompt([length - new], model.config.vocab_size, seed=0)
    limits = {"block_tokens": 128, "max_model_len": length, "max_num_seqs": 2, "max_batched_tokens": 4096}
    service = Service(model, num_blocks=1100, **limits)
    pools, peak = service.scheduler._cache.pools, {}

    forward = service.runner._forward

    def watch(inputs, failed):
        for name, pool in pools.items():
            peak[name] = max(peak.get(name, 0), pool.num_blocks - pool.num_free)
        return forward(inputs, failed)

    service.runner._forward = watch
    ids = service.core.add(request_of(prompt, max_tokens=new))
    output = service.finish(ids)[0]
    assert service.core.stats().num_steps == length // 4096 + new - 1
    for family in service.scheduler._cache.families:
        most = request_blocks(family, length, in_flight_tokens(service.config))
        assert most - 2 <= peak[family.name] <= most, family.name
    whole = SequenceInput(
        token_ids=np.concatenate((prompt.ids, output.token_ids[:-1])),
        kinds=np.full(length - 1, -1, dtype=np.int8),
        spans=(),
        features=None,
        wanted=range(length - new - 1, length - 1),
    )
    with torch.no_grad():
        logits = model.network(build_batch([whole], model.config, "cpu")).logits
    assert logits.argmax(1).tolist() == list(output.token_ids)
    assert (torch.stack(service.logits[ids[0]]) - logits).abs().max() < 1e-4
