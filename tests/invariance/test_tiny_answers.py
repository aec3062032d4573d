"""One answer, on a model whose answers mean something: deepspan-tiny's own questions, however they are scheduled."""

import pytest

from deepspan import LLM, EngineConfig, SamplingParams
from deepspan.bundled import bundled_model
from deepspan.skills.pictures import draw
from deepspan.skills.records import messages_of
from deepspan.skills.suite import EVAL_SEED, sample

SKILLS = ("reading", "position", "which", "counting", "lookup", "recall_600", "adding", "colour")
PER_SKILL = 2
PARAMS = SamplingParams(max_tokens=16, logprobs=0)
SCHEDULES = {
    "in chunks of 17": {"chunk_tokens": 17},
    "in chunks of 128": {"chunk_tokens": 128},
    "four at a time": {"max_num_seqs": 4},
    "in large blocks": {"block_tokens": 256},
    "without prefixes": {"prefix_caching": False},
}


def conversations():
    """Questions that stand on their own, as the evaluation asks them."""
    asked = []
    for skill in SKILLS:
        for index in range(PER_SKILL):
            item = sample(EVAL_SEED, index, skill).only(0)
            asked.append(messages_of(item, [draw(scene) for scene in item.images])[:1])
    return asked


def engine(**options):
    values = {"max_model_len": 2048, "max_num_seqs": 16, "max_batched_tokens": 1024}
    return LLM(bundled_model(), device="cpu", engine=EngineConfig(**values | options), cache_bytes=256 << 20)


def told(outputs):
    """Answers, and log-probabilities of their tokens to what other batch shapes round."""
    return [
        (one.text, one.finish_reason, pytest.approx([token.logprob for token in one.logprobs], abs=1e-4))
        for one in outputs
    ]


def found(outputs):
    return [(one.text, one.finish_reason, [token.logprob for token in one.logprobs]) for one in outputs]


@pytest.fixture(scope="module")
def alone():
    llm = engine(prefix_caching=False)
    return told([llm.chat(messages, PARAMS) for messages in conversations()])


def test_tiny_questions_together_and_again_are_answered_as_alone(alone):
    llm = engine()
    assert found(llm.chat_many(conversations(), PARAMS)) == alone
    again = llm.chat_many(conversations(), PARAMS)
    assert found(again) == alone
    assert sum(one.num_cached_tokens for one in again) > 0


@pytest.mark.parametrize("options", SCHEDULES.values(), ids=list(SCHEDULES))
def test_tiny_questions_scheduled_otherwise_are_answered_as_alone(alone, options):
    assert found(engine(**options).chat_many(conversations(), PARAMS)) == alone


def test_tiny_questions_that_push_each_other_out_are_answered_as_alone(alone, monkeypatch):
    llm = engine()
    scheduler, step = llm.core._scheduler, llm.core.step
    from deepspan.sched.scheduler import _Step

    def disturbed():
        # Every few steps the request that came last has to begin again.
        if llm.stats.num_steps % 5 == 4 and scheduler._running:
            scheduler._preempt(scheduler._running[-1], _Step(0))
        return step()

    monkeypatch.setattr(llm.core, "step", disturbed)
    assert found(llm.chat_many(conversations(), PARAMS)) == alone
    assert llm.stats.num_preemptions > 0
