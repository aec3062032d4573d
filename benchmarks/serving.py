"""Speed of the engine on a model: `python -m benchmarks.serving [--model FOLDER]`.

Tokens per second by number of requests at once, time to the first token with a cold and a warm prefix, and what a token
costs as the context grows. Ratios within one run are what counts: absolute numbers belong to the machine.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.report import options, write
from deepspan import LLM, EngineConfig, SamplingParams
from deepspan.bundled import bundled_model

NEW = 32
CONTEXTS = (1024, 4096, 16_384, 65_536, 131_000)


def throughput(llm: LLM, num_requests: int) -> dict[str, float]:
    """Decoded tokens per second of so many short prompts."""
    ids = np.random.default_rng(num_requests).integers(100, 250, (num_requests, 64)).tolist()
    params = SamplingParams(max_tokens=NEW, ignore_eos=True)
    llm.generate(ids, SamplingParams(max_tokens=1))  # prompts are cached then: what is left is decoding
    start = time.perf_counter()
    llm.generate(ids, params)
    return {"tokens_per_second": round(num_requests * NEW / (time.perf_counter() - start), 1)}


def first_token(llm: LLM) -> dict[str, float]:
    """Seconds to the first token of a question about a picture: cold, and again."""
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (560, 560, 3), dtype=np.uint8))
    text = "Look at the picture. " * 30
    content = [{"type": "text", "text": text}, {"type": "image", "image": picture}, {"type": "text", "text": "What?"}]
    found = {}
    for name in ("cold", "warm"):
        start = time.perf_counter()
        output = llm.chat([{"role": "user", "content": content}], SamplingParams(max_tokens=1))
        found[f"{name}_seconds"] = round(time.perf_counter() - start, 4)
        found[f"{name}_cached_tokens"] = output.num_cached_tokens
    found["cold_over_warm"] = round(found["cold_seconds"] / found["warm_seconds"], 2)
    return found


def by_context(llm: LLM, longest: int) -> dict[str, dict[str, float]]:
    """Milliseconds per decoded token after so many tokens."""
    found = {}
    for length in (one for one in CONTEXTS if one <= longest):
        ids = np.random.default_rng(length).integers(100, 250, length).tolist()
        start = time.perf_counter()
        llm.generate([ids], SamplingParams(max_tokens=1))
        prefill = time.perf_counter() - start
        start = time.perf_counter()
        llm.generate([ids], SamplingParams(max_tokens=1 + NEW, ignore_eos=True))
        decode = (time.perf_counter() - start) / NEW
        found[f"{length}"] = {
            "prefill_tokens_per_second": round(length / prefill, 1),
            "milliseconds_per_token": round(1000 * decode, 2),
        }
    return found


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--model", type=Path, help="checkpoint folder; the bundled one if not given")
    parser.add_argument("--longest", type=int, default=131_000, help="longest context to measure")
    arguments = parser.parse_args()
    limits = EngineConfig(max_num_seqs=32, max_batched_tokens=2048, max_model_len=131_072)
    llm = LLM(arguments.model or bundled_model(), engine=limits)
    llm.generate("warm up", SamplingParams(max_tokens=2))
    results: dict[str, Any] = {f"{count} at once": throughput(llm, count) for count in (1, 8, 32)}
    results["first token"] = first_token(llm)
    results["context"] = by_context(llm, arguments.longest)
    write("serving", results, arguments.out)


if __name__ == "__main__":
    main()
