"""Plain MTP in the engine: what it guesses is what a replay of the whole sequence says, however the engine got there.

The replay keeps no cache: it computes the network and the stage anew on everything for every guess. Greedy answers are
those without drafts. Guesses of random stages are hardly ever right: accepted runs come from a drafter that was told.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from draft_helpers import Told
from engine_helpers import request_of
from network_helpers import SMALL, SMALL_IMAGES, encode, make_prompt

from deepspan import LLM
from deepspan.config.engine import EngineConfig
from deepspan.core.media import TokenKind
from deepspan.model.rope import BatchRope
from deepspan.runtime.batch_builder import SequenceInput, build_batch
from deepspan.sched.scheduler import _Step
from deepspan.weights.table import DraftKind
from deepspan.weights.tiny import write_tiny

BLOCK = 16
PROMPTS = {
    "short": [3],
    "text": [45],
    "picture": [7, (9, 12), 20],
    "two pictures": [(6, 6), 3, (9, 6), 2],
    "picture over blocks": [14, (12, 15), 1],
}
NEAR = 1e-3  # logits nearer than this may change places with the order of additions


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("tiny") / "mtp"
    overrides = SMALL | SMALL_IMAGES
    return write_tiny(out, ratios=(0, 4, 16, 4), seed=5, draft_stages=1, draft_kind=DraftKind.MTP, overrides=overrides)


def open_llm(folder, **engine):
    values = {"block_tokens": BLOCK, "max_model_len": 400, "max_num_seqs": 6, "max_batched_tokens": 600}
    return LLM(folder, device="cpu", engine=EngineConfig(**{**values, **engine}), cache_bytes=1 << 26)


def prompt_of(llm, name):
    return make_prompt(PROMPTS[name], llm.config.vocab_size - 20, seed=len(name))


class Service:
    """An engine that drafts with MTP; its guesses are kept, and where `told` knows better, replaced."""

    def __init__(self, folder, told, *, num_drafts=4, **engine):
        self.llm = open_llm(folder, draft_method="mtp", num_drafts=num_drafts, **engine)
        self.guessed = []  # (request, tokens after the prompt, guesses, wanted)
        drafting = self.llm._runner._drafting
        propose = drafting.propose

        def spying(anchors):
            found = propose(anchors)
            for anchor, drafts in zip(anchors, found, strict=True):
                row = anchor.row
                assert anchor.position == len(row.request.token_ids) + len(row.generated) - 1
                self.guessed.append((row.request, tuple(row.generated), drafts.tokens, anchor.count))
            known = [told._guesses(anchor) for anchor in anchors]
            return [right if right.tokens else own for own, right in zip(found, known, strict=True)]

        drafting.propose = spying

    def preempt(self, request_id):
        sequence = self.llm.core._scheduler.sequence(request_id)
        if sequence.row is not None:
            self.llm.core._scheduler._preempt(sequence, _Step(0))

    def finish(self, requests, disturb=None):
        core, step = self.llm.core, 0
        ids = [request_id for request in requests for request_id in core.add(request)]
        while not all(core.is_finished(i) for i in ids):
            if disturb is not None:
                disturb(step, [i for i in ids if not core.is_finished(i)])
            core.step()
            core.check()
            step += 1
        return [core.take(i).token_ids for i in ids]


@pytest.fixture(scope="module")
def told():
    return Told(wrong_at=3)


@pytest.fixture(scope="module")
def plain(folder, told):
    """{name of a prompt: its request, its tokens without drafts}"""
    llm = open_llm(folder)
    told.watch(llm)
    found = {}
    for name in PROMPTS:
        request = request_of(prompt_of(llm, name), name, max_tokens=12)
        (request_id,) = llm.core.add(request)
        while not llm.core.is_finished(request_id):
            llm.core.step()
        found[name] = (request, llm.core.take(request_id).token_ids)
    return found


def normed(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@torch.no_grad()
def replay(llm, name, generated, count):
    """Logits of each guess, fp32 [count, V], and the guesses, from nothing but the tokens."""
    network, drafter, config = llm._runner._network, llm._runner._drafting._drafter, llm.config
    stage, prompt = drafter.stage, prompt_of(llm, name)
    ids = [*prompt.ids.tolist(), *generated]
    kinds = [*prompt.kinds.tolist(), *[TokenKind.TEXT] * len(generated)]
    whole = SequenceInput(
        token_ids=np.asarray(ids),
        kinds=np.asarray(kinds, dtype=np.int8),
        spans=prompt.spans,
        features=encode(network, prompt),
        wanted=(0,),
    )
    batch = build_batch([whole], config, "cpu")
    last = config.num_hidden_layers - 1
    streams = network(batch, (last,)).streams[last][:-1]
    following = network.embed_rows(batch)[1:].clone()
    following[0] = 0
    kinds = kinds[1:]
    rows, guesses = [], []
    for _ in range(count):
        length = len(kinds)
        text = SequenceInput(
            token_ids=np.zeros(length, dtype=np.int64),
            kinds=np.full(length, TokenKind.TEXT, dtype=np.int8),
            spans=(),
            features=None,
            wanted=(0,),
        )
        own = replace(build_batch([text], config, "cpu"), kinds=torch.tensor(kinds))
        eps = config.rms_norm_eps
        joined = normed(streams, stage.hnorm.weight, eps) @ stage.h_proj.weight.T
        joined = joined + (normed(following, stage.enorm.weight, eps) @ stage.e_proj.weight.T)[:, None]
        out = stage(joined, own, BatchRope(network.rope_tables(torch.device("cpu")), own.positions), None)
        logits = network.head(stage.norm(stage.merge(out[-1:], config, network._ops)))[0]
        logits = logits.masked_fill(llm._runner._forbidden, -torch.inf)
        rows.append(logits)
        guesses.append(int(logits.argmax()))
        streams = torch.cat((streams, out[-1:]))
        following = torch.cat((following, network.embed.weight[guesses[-1]][None].float()))
        kinds = [*kinds, TokenKind.TEXT]
    return torch.stack(rows), guesses


def check_guesses(service, plain, least=1):
    """Every guess of the engine is that of the replay; where two are as likely, what follows is not compared."""
    names = {request.token_ids.tobytes() + repr(request.spans).encode(): name for name, (request, _) in plain.items()}
    num_compared = 0
    for request, generated, found, wanted in service.guessed:
        name = names[request.token_ids.tobytes() + repr(request.spans).encode()]
        logits, expected = replay(service.llm, name, generated, wanted)
        assert len(found) == wanted
        for slot, token in enumerate(found):
            num_compared += 1
            if token != expected[slot]:
                assert logits[slot].max() - logits[slot, token] < NEAR, (name, len(generated), slot)
                break
    assert num_compared >= least
    return num_compared


# --- guesses are those of the replay


@pytest.mark.parametrize("num_drafts", [1, 4])
@pytest.mark.parametrize("name", PROMPTS)
def test_guesses_are_those_of_the_replay_and_the_answer_is_that_without(folder, plain, told, name, num_drafts):
    request, tokens = plain[name]
    service = Service(folder, told, num_drafts=num_drafts)
    assert service.finish([request]) == [tokens]
    assert service.llm.stats.num_accepted_tokens > 0
    assert service.llm.stats.num_accepted_tokens < service.llm.stats.num_draft_tokens
    check_guesses(service, plain, least=5)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 16, 37])
def test_prompts_in_chunks_and_batches_are_guessed_as_alone(folder, plain, told, chunk_tokens):
    service = Service(folder, told, chunk_tokens=chunk_tokens)
    requests = [request for request, _ in plain.values()]
    assert service.finish(requests) == [tokens for _, tokens in plain.values()]
    check_guesses(service, plain, least=50)


@pytest.mark.parametrize("name", ["text", "picture"])
def test_cached_prefix_is_guessed_from_as_if_it_were_computed(folder, plain, told, name):
    request, tokens = plain[name]
    service = Service(folder, told)
    assert service.finish([request]) == [tokens]
    cached = service.llm.stats.num_cached_tokens
    assert service.finish([request]) == [tokens]
    assert service.llm.stats.num_cached_tokens > cached
    check_guesses(service, plain, least=20)


def test_prefix_followed_by_another_token_drops_its_last_block(folder, plain, told):
    """The stage's row at a block's end is made of the token behind it: with another one, that block is no hit."""
    request, tokens = plain["text"]
    service = Service(folder, told)
    service.finish([request])
    for boundary, expected in ((2 * BLOCK, BLOCK), (2 * BLOCK + 1, 2 * BLOCK), (2 * BLOCK - 1, BLOCK)):
        ids = request.token_ids.copy()
        ids[boundary] = (ids[boundary] + 1 - 2) % (service.llm.config.vocab_size - 20) + 2
        before = service.llm.stats.num_cached_tokens
        service.finish([replace(request, token_ids=ids)])
        assert service.llm.stats.num_cached_tokens - before == expected
    service.guessed.clear()
    assert service.finish([request]) == [tokens]
    check_guesses(service, plain, least=10)


def test_preempted_requests_are_guessed_for_as_if_nothing_had_been(folder, plain, told):
    calm, service = Service(folder, told, chunk_tokens=16), Service(folder, told, chunk_tokens=16)
    requests = [request for request, _ in plain.values()]
    expected = [tokens for _, tokens in plain.values()]
    assert calm.finish(requests) == expected

    def disturb(step, running):
        if step in (2, 5, 6, 9, 12):
            for request_id in running[step % 2 :: 2]:
                service.preempt(request_id)

    assert service.finish(requests, disturb) == expected
    assert service.llm.stats.num_preemptions > 3
    check_guesses(service, plain, least=50)


# --- sampling


@pytest.mark.parametrize("options", [{}, {"draft_sampling": "sampled"}, {"draft_rule": "block"}], ids=str)
def test_sampled_text_of_a_seed_does_not_depend_on_chunks_hits_or_mates(folder, plain, options):
    nobody = Told()
    requests = [
        replace(request, params=replace(request.params, temperature=1.0, seed=number))
        for number, (request, _) in enumerate(plain.values())
    ]
    alone = Service(folder, nobody, **options)
    expected = [alone.finish([request])[0] for request in requests]
    assert [alone.finish([request])[0] for request in requests] == expected  # from cached prefixes
    assert alone.llm.stats.num_cached_tokens > 0
    assert Service(folder, nobody, chunk_tokens=7, **options).finish(requests) == expected
    assert all(len(drafts) for _, _, drafts, _ in alone.guessed)


# --- faults


def test_stage_that_fails_for_one_request_ends_that_one_alone(folder, plain, told, monkeypatch):
    service = Service(folder, told)
    drafting = service.llm._runner._drafting
    follow, (bad, _) = drafting.follow, plain["text"]

    def failing(followed):
        if any(one.row.request.token_ids is bad.token_ids for one in followed):
            raise ArithmeticError("told to fail")
        follow(followed)

    monkeypatch.setattr(drafting, "follow", failing)
    names = list(plain)
    core = service.llm.core
    ids = [core.add(plain[name][0])[0] for name in names]
    while not all(core.is_finished(i) for i in ids):
        core.step()
        core.check()
    for name, request_id in zip(names, ids, strict=True):
        output = core.take(request_id)
        if name == "text":
            assert (output.finish_reason, output.token_ids) == ("error", ())
            assert "told to fail" in output.error
        else:
            assert output.token_ids == plain[name][1]
    assert service.finish([plain["text"][0]], None) == [()]  # and nothing of it can be found by the next one
    assert service.llm.stats.num_cached_tokens == 0


def test_automatic_depth_keeps_the_rows_of_steps_that_guess_nothing(folder, plain, told, monkeypatch):
    """Steps without guesses write rows too: guesses after them are as if all had been guessed for."""
    service = Service(folder, told, draft_depth="auto")
    depths = iter([4, 0, 0, 2, 0, 4, 1, 0, 3] * 20)
    monkeypatch.setattr(service.llm.core._depth, "choose", lambda _: next(depths))
    requests = [request for request, _ in plain.values()]
    assert service.finish(requests) == [tokens for _, tokens in plain.values()]
    check_guesses(service, plain, least=20)
