"""Cost of a step without a model: `python -m benchmarks.scheduler`.

An executor that answers at once, so that what is left is planning, cache accounting and output handling.
"""

from collections.abc import Iterator
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.report import best_of, options, write
from deepspan.config.engine import EngineConfig
from deepspan.core.media import TokenKind
from deepspan.core.request import Request
from deepspan.core.sampling import SamplingParams
from deepspan.core.step import StepPlan, StepResult
from deepspan.engine.core import EngineCore
from deepspan.kv.families import Family
from deepspan.kv.manager import CacheManager
from deepspan.sched.scheduler import Scheduler
from deepspan.text.tiny_tokenizer import write_tiny_tokenizer
from deepspan.text.tokenizer import Tokenizer

RATIOS = (4, 128)
PROMPT, NEW = 600, 200


class NoOpExecutor:
    """Every chunk that samples gets the same token."""

    def run(self, plan: StepPlan) -> StepResult:
        return StepResult(tokens={chunk.request_id: 65 for chunk in plan.chunks if chunk.samples})


def families() -> Iterator[Family]:
    """As many families, and as large, as the released model has."""
    yield Family(name="window", kind="window", ratio=1, reach=127, layers=(0,), block_tokens=128, block_rows=128,
                 row_bytes=1)  # fmt: skip
    for ratio in RATIOS:
        for name, kind in ((f"rows_{ratio}", "rows"), (f"index_{ratio}", "rows"), (f"state_{ratio}", "state")):
            if name != "index_128":
                yield Family(name=name, kind=kind, ratio=ratio, reach=0, layers=(0,), block_tokens=128,
                             block_rows=128 // ratio, row_bytes=1)  # type: ignore[arg-type]  # fmt: skip


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
    kinds = tuple(families())
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
