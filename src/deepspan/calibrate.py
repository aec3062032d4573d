"""Which inputs the linear layers of a model take, seen while it answers given questions: for int8 with fixed scales.

A file of examples has one JSON object a line: `{"text": "...", "images": ["picture.png"]}`, pictures relative to the
file. Invariant: the same model, file and pictures give the same ranges on the same machine. Called by
`deepspan convert --calibrate`.
"""

import hashlib
import json
import math
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepspan.core.sampling import SamplingParams
from deepspan.errors import InputError, WeightsError
from deepspan.llm import LLM
from deepspan.weights.forms import FUSED
from deepspan.weights.quantise import InputRange

NEW_TOKENS = 32  # of each answer: decoding sees other inputs than reading does
BATCH = 8

Progress = Callable[[int, int], None]  # examples done, examples in all


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A question. where: file and line, for messages."""

    text: str
    images: tuple[Path, ...]
    where: str


def read_examples(file: Path) -> list[Example]:
    """Raises InputError naming the line that is no example, or the picture that is not there."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    examples = [_example(file, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not examples:
        raise InputError(f"{file} holds no example, expected one JSON object a line")
    return examples


def _example(file: Path, number: int, line: str) -> Example:
    where = f"{file.name}, line {number}"
    try:
        found = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where}: not JSON: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("text"), str) or found.keys() - {"text", "images"}:
        raise InputError(f'{where}: expected {{"text": "...", "images": [...]}}, found {line.strip()[:80]}')
    images = found.get("images", [])
    if not isinstance(images, list) or not all(isinstance(name, str) for name in images):
        raise InputError(f"{where}: images must be a list of files, found {images!r}")
    paths = tuple(file.parent / name for name in images)
    for path in paths:
        if not path.is_file():
            raise InputError(f"{where}: no picture at {path}")
    return Example(text=found["text"], images=paths, where=where)


def digest_of_examples(examples: Iterable[Example]) -> str:
    """Changes with any text or picture."""
    digest = hashlib.sha256()
    for example in examples:
        pictures = [hashlib.sha256(image.read_bytes()).hexdigest() for image in example.images]
        digest.update(json.dumps([example.text, pictures]).encode())
    return digest.hexdigest()


def input_ranges(
    llm: LLM, examples: Sequence[Example], modules: Collection[str], progress: Progress | None = None
) -> dict[str, InputRange]:
    """Range of inputs by module, of those of `modules` that saw any while every example was answered greedily.

    Raises InputError naming the example that cannot be served, WeightsError naming a module with inputs that are not
    finite.
    """
    params = SamplingParams(max_tokens=NEW_TOKENS)
    with _watching(llm.modules, modules) as seen:
        for start in range(0, len(examples), BATCH):
            _answer(llm, examples[start : start + BATCH], params)
            if progress is not None:
                progress(min(start + BATCH, len(examples)), len(examples))
    ranges = {module: InputRange(low=float(low), high=float(high)) for module, (low, high) in seen.items()}
    for module, found in ranges.items():
        if not (math.isfinite(found.low) and math.isfinite(found.high)):
            raise WeightsError(f"inputs of {module} reach from {found.low} to {found.high}; expected finite numbers")
    return _joined(ranges)


def _answer(llm: LLM, examples: Sequence[Example], params: SamplingParams) -> None:
    conversations = [_conversation(example) for example in examples]
    for example, conversation in zip(examples, conversations, strict=True):
        try:
            llm.chat_request(conversation, params)
        except InputError as error:
            raise InputError(f"{example.where}: {error}") from None
    for example, output in zip(examples, llm.chat_many(conversations, params), strict=True):
        if output.finish_reason == "error":
            raise InputError(f"{example.where}: {output.error}")


def _conversation(example: Example) -> list[dict[str, Any]]:
    content = [{"type": "image", "image": image} for image in example.images] + [{"type": "text", "text": example.text}]
    return [{"role": "user", "content": content}]


@contextmanager
def _watching(modules: Mapping[str, nn.Module], names: Collection[str]) -> Generator[dict[str, tuple[Tensor, Tensor]]]:
    """While the block runs, what it yields holds the least and the greatest input of each module that has seen any."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def see(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            if arguments[0].numel():
                low, high = torch.aminmax(arguments[0].detach().float())
                before = seen.get(name, (low, high))
                seen[name] = torch.minimum(before[0], low), torch.maximum(before[1], high)

        return see

    hooks = [modules[name].register_forward_pre_hook(watch(name)) for name in names if name in modules]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _joined(ranges: Mapping[str, InputRange]) -> dict[str, InputRange]:
    """Without modules whose partner saw nothing: what kernels join has one format."""
    partners = [pair for first, second in FUSED for pair in ((first, second), (second, first))]

    def is_whole(module: str) -> bool:
        return all(module.removesuffix(own) + other in ranges for own, other in partners if module.endswith(f".{own}"))

    return {module: found for module, found in ranges.items() if is_whole(module)}
