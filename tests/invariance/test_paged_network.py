"""The network on caches against the network on whole sequences: any cut into chunks, any neighbours, any blocks."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from network_helpers import batch_of, encode, logits_of, make_prompt, relative_error

from deepspan.config.engine import EngineConfig
from deepspan.core.media import TokenKind
from deepspan.kv.families import cache_families
from deepspan.kv.keys import KeyChain
from deepspan.kv.manager import CacheManager
from deepspan.runtime.caches import Caches
from deepspan.runtime.step_builder import ChunkInput, StepBuilder

BOUND = 1e-5
CPU = torch.device("cpu")
PARTS = [[5, (12, 15), 30, (6, 6), 9], [70], [3, (9, 9), (6, 12), 40], [33]]


class Paged:
    """A network on caches, fed chunk by chunk. Block order is shuffled, so that no two families agree by chance."""

    def __init__(self, model, block_tokens=16, num_blocks=60, rows=4, prefix_caching=False, **engine):
        self.model = model
        self.engine = EngineConfig(
            block_tokens=block_tokens, max_model_len=400, max_num_seqs=rows, max_batched_tokens=800, **engine
        )
        is_packed = self.engine.kv_dtype == "fp8"
        self.families = cache_families(model.config, block_tokens, 4, self.engine.num_drafts, is_packed=is_packed)
        counts = {family.name: num_blocks + i for i, family in enumerate(self.families)}
        self.manager = CacheManager(self.families, counts, prefix_caching)
        rng = np.random.default_rng(0)
        for pool in self.manager.pools.values():
            for block in rng.permutation(list(pool._free)).tolist():
                pool._free.move_to_end(block)
        self.caches = Caches(model.config, self.engine, self.families, counts, torch.float32, CPU)
        self.builder = StepBuilder(model.config, self.engine, self.families, self.caches, CPU)
        self.features = {}

    def open(self, key, prompt, identities=None):
        """Make a prompt known; returns the tokens that need not be computed."""
        names = identities or [f"{key}.{i}" for i in range(len(prompt.spans))]
        images = [SimpleNamespace(digest=name) for name in names]
        ids = prompt.ids.tolist()
        self.manager.open(key, ids, prompt.spans, KeyChain(ids, prompt.spans, images, self.engine.block_tokens))
        self.features[key] = encode(self.model.network, prompt)
        return self.manager.find_prefix(key)

    @torch.no_grad()
    def step(self, *chunks):
        """chunks: (key, row, prompt, start, end, prefix or None to go on). Returns fp32 logits of every row."""
        inputs = []
        for key, row, prompt, start, end, prefix in chunks:
            admit, extend = self.manager.admit, self.manager.extend
            new = extend(key, end) if prefix is None else admit(key, prefix, end, end)
            assert new is not None
            self.caches.update(row, new, begins=prefix is not None)
            kinds, features = prompt.kinds[start:end], None
            if (kinds == TokenKind.IMAGE).any():
                before = int((prompt.kinds[:start] == TokenKind.IMAGE).sum())
                features = self.features[key][before : before + int((kinds == TokenKind.IMAGE).sum())]
            inputs.append(
                ChunkInput(
                    row=row,
                    start=start,
                    token_ids=prompt.ids[start:end],
                    kinds=kinds,
                    spans=prompt.spans,
                    features=features,
                    wanted=range(start, end),
                )
            )
        logits = self.model.network(self.builder.build(inputs)).logits.numpy()
        for key, _, _, _, end, _ in chunks:
            self.manager.commit(key, end)
        self.manager.check()
        self._poison()
        return logits

    def _poison(self):
        """Spoil every block that nobody holds and nobody can find: reading one shows in the logits."""
        for ratio, layer in zip(self.model.config.compress_ratios, self.caches.layers, strict=True):
            names = ("window", f"rows_{ratio}", f"state_{ratio}", f"index_{ratio}", f"state_{ratio}")
            for name, cache in zip(names, fields(layer), strict=True):
                if cache is not None:
                    pool = self.manager.pools[name]
                    spoilt = 255 if cache.dtype == torch.uint8 else torch.nan  # packed rows: NaN as value and as scale
                    cache[[0, *(block for block in pool._free if block not in pool._key_of)]] = spoilt

    def run(self, key, row, prompt, cuts=(), prefix=0):
        """Logits of the rows from `prefix` on."""
        edges = [prefix, *(cut for cut in cuts if prefix < cut < len(prompt)), len(prompt)]
        steps = [
            self.step((key, row, prompt, start, end, prefix if start == prefix else None))
            for start, end in pairwise(edges)
        ]
        return np.concatenate(steps)


def allowed(prompt, cut):
    return not any(span.offset < cut <= span.last for span in prompt.spans)


@pytest.fixture(scope="module", params=[(0, 4, 16, 4), (4, 0, 16, 0)])
def model(request, tiny_models):
    return tiny_models(ratios=request.param)


@pytest.fixture(scope="module")
def prompts(model):
    return [make_prompt(parts, model.config.vocab_size, seed) for seed, parts in enumerate(PARTS)]


@pytest.fixture(scope="module")
def whole(model, prompts):
    return [logits_of(model.network, batch_of(model, [prompt])) for prompt in prompts]


@pytest.mark.parametrize("block_tokens", [16, 32, 64])
@pytest.mark.parametrize("chunk", [1, 3, 17, 64])
def test_chunks_of_any_size_give_the_logits_of_the_whole(model, prompts, whole, block_tokens, chunk):
    for index, prompt in enumerate(prompts):
        paged = Paged(model, block_tokens)
        paged.open(0, prompt)
        cuts = [cut for cut in range(chunk, len(prompt), chunk) if allowed(prompt, cut)]
        assert relative_error(paged.run(0, 2, prompt, cuts), whole[index]) < BOUND


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.data())
def test_any_cut_of_any_prompt_gives_the_logits_of_the_whole(model, prompts, whole, data):
    index = data.draw(st.integers(0, len(prompts) - 1))
    prompt = prompts[index]
    places = [cut for cut in range(1, len(prompt)) if allowed(prompt, cut)]
    cuts = sorted(data.draw(st.sets(st.sampled_from(places), max_size=12)))
    drafts = data.draw(st.sampled_from([0, 3]))
    paged = Paged(model, num_drafts=drafts)
    paged.open(0, prompt)
    assert relative_error(paged.run(0, 0, prompt, cuts), whole[index]) < BOUND


def test_neighbours_in_a_step_change_nothing(model, prompts, whole):
    """All prompts together, each at its own pace, in rows of any order."""
    rng = np.random.default_rng(3)
    paged, done = Paged(model), [0] * len(prompts)
    found = [[] for _ in prompts]
    for key, prompt in enumerate(prompts):
        paged.open(key, prompt)
    while any(d < len(p) for d, p in zip(done, prompts, strict=True)):
        chunks = []
        for key in rng.permutation(len(prompts)).tolist():
            prompt, start = prompts[key], done[key]
            if start == len(prompt) or rng.random() < 0.2:
                continue
            end = min(len(prompt), start + int(rng.integers(1, 40)))
            while not allowed(prompt, end):
                end += 1
            chunks.append((key, 3 - key, prompt, start, end, 0 if start == 0 else None))
        if not chunks:
            continue
        logits, first = paged.step(*chunks), 0
        for key, _, _, start, end, _ in chunks:
            found[key].append(logits[first : first + end - start])
            first += end - start
            done[key] = end
    for index, rows in enumerate(found):
        assert relative_error(np.concatenate(rows), whole[index]) < BOUND


def test_rows_after_a_prefix_hit_are_those_of_a_cold_run(model, prompts, whole):
    """At every boundary that can be a hit: the same prompt again, cut off after the boundary."""
    for index, prompt in enumerate(prompts):
        names = [f"image {i}" for i in range(len(prompt.spans))]
        paged = Paged(model, prefix_caching=True)
        paged.open(0, prompt, names)
        paged.run(0, 0, prompt, [cut for cut in (16, 40) if allowed(prompt, cut)])
        paged.manager.close(0)
        hits = 0
        for key, end in enumerate(range(17, len(prompt) + 1, 16), start=1):
            if not allowed(prompt, end):
                continue
            shorter = make_shorter(prompt, end)
            prefix = paged.open(key, shorter, names[: len(shorter.spans)])
            hits += prefix > 0
            logits = paged.run(key, key % 4, shorter, prefix=prefix)
            assert relative_error(logits, whole[index][prefix:end]) < BOUND
            paged.manager.close(key)
        assert hits > 0


def make_shorter(prompt, end):
    """The first `end` tokens."""
    spans = tuple(span for span in prompt.spans if span.last < end)
    return type(prompt)(ids=prompt.ids[:end], kinds=prompt.kinds[:end], spans=spans, images=prompt.images[: len(spans)])


def test_positions_taken_back_and_computed_again_leave_no_trace(model, prompts, whole):
    """As after rejected drafts: other tokens at the next positions first, then the right ones."""
    prompt = prompts[1]
    wrong = make_prompt([len(prompt)], model.config.vocab_size, seed=99)
    paged = Paged(model, num_drafts=3)
    paged.open(0, prompt)
    rows = []
    for start in range(len(prompt)):
        end = min(start + 4, len(prompt))
        mixed = type(prompt)(
            ids=np.concatenate((prompt.ids[: start + 1], wrong.ids[start + 1 : end], prompt.ids[end:])),
            kinds=prompt.kinds,
            spans=(),
            images=(),
        )
        rows.append(step_and_keep_one(paged, mixed, start, end))
    assert relative_error(np.concatenate(rows), whole[1]) < BOUND


def step_and_keep_one(paged, prompt, start, end):
    commit = paged.manager.commit
    paged.manager.commit = lambda key, _: commit(key, start + 1)
    logits = paged.step((0, 1, prompt, start, end, 0 if start == 0 else None))
    paged.manager.commit = commit
    return logits[:1]


def test_cached_rows_of_other_sequences_are_never_written(model, prompts):
    """A step changes the blocks of its own sequences and nothing else."""
    paged = Paged(model)
    for key in (0, 1):
        paged.open(key, prompts[key])
    paged.run(0, 0, prompts[0])
    before = [[None if c is None else c.clone() for c in fields(layer)] for layer in paged.caches.layers]
    paged.run(1, 1, prompts[1], [20, 21, 50])
    mine = {name: {b for b in table if b} for name, table in paged.manager.tables(0).items()}
    for ratio, old, layer in zip(model.config.compress_ratios, before, paged.caches.layers, strict=True):
        names = ("window", f"rows_{ratio}", f"state_{ratio}", f"index_{ratio}", f"state_{ratio}")
        for name, was, now in zip(names, old, fields(layer), strict=True):
            if was is not None:
                kept = sorted(mine[name])
                assert torch.equal(was[kept], now[kept]), name


def fields(layer):
    return (layer.window, layer.entries, layer.state, layer.index, layer.index_state)


def test_buffers_keep_their_addresses_and_forget_larger_steps(model, prompts):
    paged = Paged(model)
    seen = set()
    for key, prompt in enumerate(prompts):
        paged.open(key, prompt)
    build = paged.builder.build

    def spy(chunks):
        batch = build(chunks)
        caches, meta = batch.caches, batch.attention
        tensors = [batch.token_ids, batch.kinds, batch.positions, batch.logits_rows, meta.row_lo, meta.row_hi]
        tensors += [caches.window_slots, caches.seqused, caches.start_pos, *caches.tables.values()]
        seen.add(tuple(tensor.data_ptr() for tensor in tensors))
        assert caches.seqused.tolist() == [c.end - c.start for c in chunks] + [0] * (4 - len(chunks))
        assert caches.start_pos.tolist() == [c.start for c in chunks] + [0] * (4 - len(chunks))
        return batch

    paged.builder.build = spy
    paged.step(*((key, key, prompts[key], 0, 3, 0) for key in range(4)))
    paged.step((1, 1, prompts[1], 3, 30, None))
    paged.step((1, 1, prompts[1], 30, 31, None), (3, 3, prompts[3], 3, 4, None))
    assert len(seen) == 1
