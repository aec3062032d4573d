"""`deepspan generate`: load with a progress bar, stream one answer to the terminal.

The answer goes to stdout and nothing else does; progress, reasoning (dimmed) and the reason for an early end go to
stderr, so that the command can be piped.
"""

from pathlib import Path
from typing import Any, cast, get_args

from deepspan.bundled import bundled_model
from deepspan.cli.options import DraftOptions
from deepspan.cli.progress import counting, notes
from deepspan.config.engine import EngineConfig
from deepspan.core.sampling import SamplingParams
from deepspan.errors import InputError
from deepspan.image.decode import ImageMode
from deepspan.llm import LLM
from deepspan.text.switches import ChatOptions, Effort


def run(
    *,
    question: str,
    model: Path | None,
    images: list[Path],
    system: str,
    effort: str,
    raw: bool,
    image_mode: str,
    device: str,
    dtype: str,
    drafts: DraftOptions,
    **sampling: Any,
) -> None:
    """Raises DeepspanError for anything the user can mend; nothing is loaded before options are checked."""
    params = SamplingParams(**sampling)
    engine = EngineConfig(**drafts.engine_fields())
    options = ChatOptions(effort=cast(Effort, _one_of("effort", effort, get_args(Effort))))
    mode = cast(ImageMode, _one_of("image-mode", image_mode, get_args(ImageMode)))
    if raw and (images or system):
        raise InputError("--raw continues plain text: it takes neither --image nor --system")
    for image in images:
        if not image.is_file():
            raise InputError(f"no picture at {image}")
    llm = load(model, device=device, dtype=dtype, engine=engine, image_mode=mode)
    if raw:
        print(llm.generate(question, params)[0].text, flush=True)
        return
    content = [{"type": "image", "image": image} for image in images] + [{"type": "text", "text": question}]
    messages = [{"role": "system", "content": system}] if system else []
    _stream(llm, [*messages, {"role": "user", "content": content}], params, options)


def load(
    model: Path | None, *, device: str, dtype: str, engine: EngineConfig, image_mode: ImageMode = "serving"
) -> LLM:
    """Load a model (the bundled one if None) with a progress bar on stderr, which vanishes when it is done."""
    model = model or bundled_model()
    with counting("loading", "tensors") as progress:
        return LLM(model, device=device, dtype=dtype, engine=engine, image_mode=image_mode, progress=progress)


def _stream(llm: LLM, messages: list[dict[str, Any]], params: SamplingParams, options: ChatOptions) -> None:
    for event in llm.stream_chat(messages, params, options):
        if event.reasoning:
            notes.print(event.reasoning, style="dim", end="", markup=False)
        print(event.text, end="", flush=True)
        if event.finish_reason == "length":
            notes.print(f"\n[stopped after {params.max_tokens} tokens: --max-tokens]", markup=False, end="")
    print(flush=True)


def _one_of(option: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise InputError(f"--{option} must be one of {', '.join(choices)}, found {value!r}")
    return value
