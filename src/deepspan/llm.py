"""Python API: load a model, generate and chat. The one place that joins the engine to the runtime.

    llm = LLM("path/to/checkpoint")
    parts = [{"type": "image", "image": Path("cat.png")}, {"type": "text", "text": "What is this?"}]
    llm.chat([{"role": "user", "content": parts}]).text

Not thread-safe: one call at a time.
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from deepspan.core.output import RequestOutput, TokenEvent
from deepspan.core.request import Request, SamplingParams
from deepspan.engine.inputs import InputBuilder
from deepspan.engine.outputs import OutputCollector
from deepspan.errors import ConfigError, InputError
from deepspan.image.decode import DEFAULT_LIMITS, ImageLimits, ImageMode
from deepspan.ops.registry import Provider, bind, resolve
from deepspan.runtime.device import pick_device, pick_dtype
from deepspan.runtime.runner import Runner
from deepspan.runtime.sampler import choose_token
from deepspan.text.switches import ChatOptions
from deepspan.text.tokenizer import Tokenizer
from deepspan.weights.load import Progress, load_model

Message = Mapping[str, Any]


class LLM:
    """A loaded model."""

    def __init__(
        self,
        model: str | Path,
        *,
        device: str = "auto",
        dtype: str = "auto",
        image_mode: ImageMode = "serving",
        image_limits: ImageLimits = DEFAULT_LIMITS,
        providers: Sequence[Provider] = (),
        progress: Progress | None = None,
    ) -> None:
        """model: checkpoint folder. image_mode: `reference` repeats the release's plain RGB conversion bit for bit.

        providers: implementations of operations to prefer over the torch references, in order.

        Raises ConfigError or WeightsError naming what does not fit.
        """
        if image_mode not in get_args(ImageMode):
            raise ConfigError(f"image_mode must be one of {', '.join(get_args(ImageMode))}, found {image_mode!r}")
        target = pick_device(device)
        compute = pick_dtype(dtype, target)
        loaded = load_model(
            model, dtype=compute, device=target, ops=bind(resolve(target.type, compute, providers)), progress=progress
        )
        self.config = loaded.config
        self.tokenizer = Tokenizer(model, vision=self.config.vision is not None)
        if self.tokenizer.vocab_size > self.config.vocab_size:
            raise ConfigError(
                f"the tokenizer has ids up to {self.tokenizer.vocab_size - 1}, vocab_size is {self.config.vocab_size}"
            )
        self._inputs = InputBuilder(self.config, self.tokenizer, image_mode=image_mode, limits=image_limits)
        self._runner = Runner(loaded, target)
        self._forbidden = _never_generated(self.tokenizer, self.config.vocab_size).to(target)

    def generate(
        self, prompts: str | Sequence[int] | Sequence[str | Sequence[int]], params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """Continue raw prompts (text or ids); nothing is added to them. One output per prompt, in order.

        Raises InputError before anything runs if a prompt cannot be served.
        """
        many = [prompts] if _is_one_prompt(prompts) else list(prompts)
        params = params or SamplingParams()
        return self._finish([self._inputs.from_prompt(prompt, params) for prompt in many])  # type: ignore[arg-type]

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        options: ChatOptions | None = None,
    ) -> RequestOutput:
        """Answer a conversation. Image parts are `{"type": "image", "image": Path | bytes | PIL image}`."""
        return self._finish([self._chat_request(messages, params, options)])[0]

    def chat_many(
        self,
        conversations: Sequence[Sequence[Message]],
        params: SamplingParams | None = None,
        options: ChatOptions | None = None,
    ) -> list[RequestOutput]:
        """Answer several conversations in one batch, in order."""
        return self._finish([self._chat_request(messages, params, options) for messages in conversations])

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        options: ChatOptions | None = None,
    ) -> Iterator[TokenEvent]:
        """Answer a conversation token by token; the last event carries the finish reason."""
        request = self._chat_request(messages, params, options)
        return self._run([request], [OutputCollector(0, request, self.tokenizer)])

    def _chat_request(
        self, messages: Sequence[Message], params: SamplingParams | None, options: ChatOptions | None
    ) -> Request:
        options = options or ChatOptions(effort="none")
        return self._inputs.from_messages(messages, options, params or SamplingParams())

    def _finish(self, requests: Sequence[Request]) -> list[RequestOutput]:
        collectors = [OutputCollector(i, request, self.tokenizer) for i, request in enumerate(requests)]
        for _ in self._run(requests, collectors):
            pass
        return [collector.output() for collector in collectors]

    def _run(self, requests: Sequence[Request], collectors: Sequence[OutputCollector]) -> Iterator[TokenEvent]:
        seeds = [secrets.randbits(64) if r.params.seed is None else r.params.seed for r in requests]
        features = [self._runner.encode(request.images) for request in requests]
        generated: list[list[int]] = [[] for _ in requests]
        running = list(range(len(requests)))
        while running:
            logits = self._runner.next_logits(
                [requests[i] for i in running], [generated[i] for i in running], [features[i] for i in running]
            ).masked_fill(self._forbidden, -torch.inf)
            still_running = []
            for i, row in zip(running, logits, strict=True):
                token = choose_token(row, requests[i].params, seeds[i], len(generated[i]))
                generated[i].append(token)
                event = collectors[i].push(token)
                if event.finish_reason is None:
                    still_running.append(i)
                yield event
            running = still_running


def _is_one_prompt(prompts: object) -> bool:
    if isinstance(prompts, str):
        return True
    if not isinstance(prompts, Sequence | np.ndarray):
        raise InputError(f"prompts must be text, ids or a list of them, found {type(prompts).__name__}")
    return len(prompts) > 0 and isinstance(prompts[0], int | np.integer)


def _never_generated(tokenizer: Tokenizer, vocab_size: int) -> Tensor:
    """bool [V]: image tokens, and ids the tokenizer cannot spell (embeddings may be padded beyond it)."""
    forbidden = torch.tensor([not tokenizer.has_id(token_id) for token_id in range(vocab_size)])
    special = tokenizer.special
    for token_id in range(tokenizer.vocab_size):
        if token_id == special.image or special.is_sentinel(token_id):
            forbidden[token_id] = True
    return forbidden
