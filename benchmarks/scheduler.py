"""Cost of a step without a model: `python -m benchmarks.scheduler`.

An executor that answers at once, so that what is left is planning, cache accounting and output handling.
"""

from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.report import best_of, options, write
from deepspan.config.engine import EngineConfig
from deepspan.config.model import parse_model_config
from deepspan.core.media import TokenKind
from deepspan.core.request import Request
from deepspan.core.sampling import SamplingParams
from deepspan.core.step import StepPlan, StepResult
from deepspan.engine.core import EngineCore
from deepspan.kv.families import Family, cache_families
from deepspan.kv.manager import CacheManager
from deepspan.sched.scheduler import Scheduler
from deepspan.text.tiny_tokenizer import write_tiny_tokenizer
from deepspan.text.tokenizer import Tokenizer
from deepspan.weights.tiny import tiny_config

RATIOS = (0, 4, 128)
PROMPT, NEW = 600, 200


class NoOpExecutor:
    """Every chunk that samples gets the same token."""

    def run(self, plan: StepPlan) -> StepResult:
        return StepResult(tokens={chunk.request_id: 65 for chunk in plan.chunks if chunk.samples})


def families() -> tuple[Family, ...]:
    """As many families as the released model has."""
    return cache_families(parse_model_config(tiny_config(vocab_size=300, ratios=RATIOS, vision=False)), 128, 2)


def prompt(number: int) -> Request:
    ids = np.random.default_rng(number).integers(2, 200, PROMPT)
    return Request(
        token_ids=ids,
        kinds=np.full(PROMPT, TokenKind.TEXT, dtype=np.int8),
        spans=(),
        images=(),
        params=SamplingParams(max_tokens=NEW, ignore_eos=True),
    )


def run(tokenizer: Tokenizer, num_requests: int) -> int:
    """Serve so many requests at once; returns the number of steps."""
    engine = EngineConfig(max_num_seqs=num_requests, max_batched_tokens=2048, max_model_len=4096)
    kinds = families()
    cache = CacheManager(kinds, {family.name: 16 * num_requests + 64 for family in kinds})
    core = EngineCore(Scheduler(engine, cache), NoOpExecutor(), tokenizer)
    ids = [request_id for number in range(num_requests) for request_id in core.add(prompt(number))]
    while not all(core.is_finished(request_id) for request_id in ids):
        core.step()
    return core.stats().num_steps


def main() -> None:
    arguments = options(__doc__ or "").parse_args()
    results = {}
    with TemporaryDirectory() as folder:
        write_tiny_tokenizer(folder)
        tokenizer = Tokenizer(folder, vision=True)
        for num_requests in (1, 8, 32, 128):
            steps = run(tokenizer, num_requests)
            seconds = best_of(lambda count=num_requests: run(tokenizer, count))
            results[f"{num_requests} at once"] = {
                "steps_per_second": round(steps / seconds),
                "microseconds_per_step": round(1e6 * seconds / steps, 1),
                "microseconds_per_token": round(1e6 * seconds / (num_requests * NEW), 2),
            }
    write("scheduler", results, arguments.out)


if __name__ == "__main__":
    main()
