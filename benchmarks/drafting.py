"""Speed of decoding with and without drafts: `python -m benchmarks.drafting [--model FOLDER]`.

The questions of the skills, with their pictures, are answered with drafting off, at several depths and in the automatic
mode, one request or several at once. Only steps that do nothing but decode are timed. All figures of one run are taken
in turns, so that what disturbs the machine disturbs them alike; the ratio to "off" is what counts.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.report import options, write
from deepspan import LLM, EngineConfig, SamplingParams
from deepspan.bundled import bundled_model
from deepspan.core.request import Request
from deepspan.evaluate import held_out, question_of

SHORT = ("colour", "shape", "position", "reading", "counting", "which", "repeat", "lookup", "adding", "recall")
LONG = ("sentence", "series")  # answers of six to fifty tokens, where decoding is most of the work
ROUNDS = 3


@dataclass(kw_only=True)
class Measured:
    """seconds and tokens of steps that only decode; outputs of the last round."""

    seconds: float = 0.0
    tokens: int = 0
    outputs: list[tuple[int, ...]] = field(default_factory=list)


def requests_of(llm: LLM, skills: Sequence[str], count: int) -> list[Request]:
    """The first `count` held-out questions of every skill."""
    params = SamplingParams(max_tokens=48)
    exercises = [one for skill in skills for one in held_out(skill, count)]
    return [llm.chat_request(question_of(one.sample), params) for one in exercises]


def decode(llm: LLM, requests: Sequence[Request], at_once: int, into: Measured) -> None:
    """Answer all requests, `at_once` at a time, and add up the decoding."""
    into.outputs = []
    for first in range(0, len(requests), at_once):
        ids = [request_id for one in requests[first : first + at_once] for request_id in llm.core.add(one)]
        while not all(llm.core.is_finished(request_id) for request_id in ids):
            before, start = llm.stats, time.perf_counter()
            llm.core.step()
            seconds, after = time.perf_counter() - start, llm.stats
            if after.num_prompt_tokens == before.num_prompt_tokens:
                into.seconds += seconds
                into.tokens += after.num_generated_tokens - before.num_generated_tokens
        into.outputs += [llm.core.take(request_id).token_ids for request_id in ids]


def compare(model: Path, depths: Sequence[int], skills: Sequence[str], count: int, at_once: int) -> dict[str, Any]:
    """Tokens per second and acceptance at each depth; 0 is off, -1 automatic."""
    llms = {depth: LLM(model, engine=_limits(depth)) for depth in depths}
    measured = {depth: Measured() for depth in depths}
    for number in range(1 + ROUNDS):
        for depth, llm in llms.items():
            if number == 1:  # the first round warms up
                measured[depth] = Measured()
            decode(llm, requests_of(llm, skills, count), at_once, measured[depth])
    found: dict[str, Any] = {}
    for depth, llm in llms.items():
        assert measured[depth].outputs == measured[0].outputs, "drafting changed an answer"
        speed = measured[depth].tokens / measured[depth].seconds
        stats, name = llm.stats, {0: "off", -1: "auto"}.get(depth, f"{depth} drafts")
        found[name] = {"tokens_per_second": round(speed, 1)}
        found[name]["over_off"] = round(speed * measured[0].seconds / measured[0].tokens, 2)
        if stats.num_drafts:
            found[name]["accepted_share"] = round(stats.num_accepted_tokens / stats.num_draft_tokens, 3)
            found[name]["tokens_per_step"] = round(1 + stats.num_accepted_tokens / stats.num_drafts, 2)
            shares = [round(taken / stats.num_drafts, 3) for taken in stats.accepted_per_position]
            found[name]["accepted_per_position"] = shares
    return found


def _limits(depth: int) -> EngineConfig:
    if depth == 0:
        return EngineConfig(max_model_len=4096)
    if depth < 0:
        return EngineConfig(max_model_len=4096, draft_method="auto", draft_depth="auto")
    return EngineConfig(max_model_len=4096, draft_method="auto", num_drafts=depth)


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--model", type=Path, default=bundled_model(), help="checkpoint folder with draft stages")
    parser.add_argument("--questions", type=int, default=4, help="of every skill")
    given = parser.parse_args()
    depths = (0, 1, 3, 5, 7, -1)
    results = {
        "long answers, 1 at once": compare(given.model, depths, LONG, 4 * given.questions, 1),
        "long answers, 8 at once": compare(given.model, depths, LONG, 4 * given.questions, 8),
        "short answers, 1 at once": compare(given.model, depths, SHORT, given.questions, 1),
    }
    write("drafting", results, given.out)


if __name__ == "__main__":
    main()
