"""Python API: load a model, generate and chat. The one place that joins the engine to the runtime.

    llm = LLM("path/to/checkpoint")
    parts = [{"type": "image", "image": Path("cat.png")}, {"type": "text", "text": "What is this?"}]
    llm.chat([{"role": "user", "content": parts}]).text

Not thread-safe: one call at a time.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from deepspan.config.engine import EngineConfig
from deepspan.core.output import RequestOutput, TokenEvent
from deepspan.core.request import Request
from deepspan.core.sampling import SamplingParams
from deepspan.engine.core import EngineCore, EngineStats
from deepspan.engine.inputs import InputBuilder
from deepspan.errors import ConfigError, InputError
from deepspan.image.decode import DEFAULT_LIMITS, ImageLimits, ImageMode
from deepspan.kv.capacity import plan_capacity
from deepspan.kv.families import cache_families
from deepspan.kv.manager import CacheManager
from deepspan.model.mtp import Mtp
from deepspan.ops.registry import Provider, bind, resolve
from deepspan.runtime.caches import Caches
from deepspan.runtime.device import default_cache_bytes, pick_device, pick_dtype
from deepspan.runtime.profile import largest_step_bytes
from deepspan.runtime.runner import Runner
from deepspan.sched.draft_depth import DraftDepth
from deepspan.sched.scheduler import Scheduler
from deepspan.text.segments import Segment
from deepspan.text.switches import ChatOptions
from deepspan.text.tokenizer import Tokenizer
from deepspan.weights.load import Progress, drafts_to_load, load_model

Message = Mapping[str, Any]


class TokenStream(Iterator[TokenEvent]):
    """Events of one request, computed as they are asked for. Closing it, or letting go of it, aborts the request."""

    def __init__(self, step: Callable[[], None], events: deque[TokenEvent], abort: Callable[[], None]) -> None:
        """step: runs one step of the engine. events: where this request's go, whoever runs the step. abort: ends it."""
        self._step, self._events, self._abort = step, events, abort
        self._open = True

    def __next__(self) -> TokenEvent:
        while self._open and not self._events:
            self._step()
        if not self._open:
            raise StopIteration
        event = self._events.popleft()
        if event.finish_reason is not None:
            self.close()
        return replace(event, request=0)

    def close(self) -> None:
        """Abort the request unless it has ended."""
        if self._open:
            self._open = False
            self._abort()

    def __del__(self) -> None:
        self.close()


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
        engine: EngineConfig | None = None,
        cache_bytes: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        """model: checkpoint folder. engine: limits. cache_bytes: memory for caches, by default a part of the device's.

        image_mode: `reference` repeats the release's plain RGB conversion bit for bit.

        providers: implementations of operations to prefer over the torch references, in order.
        Raises ConfigError or WeightsError naming what does not fit.
        """
        if image_mode not in get_args(ImageMode):
            raise ConfigError(f"image_mode must be one of {', '.join(get_args(ImageMode))}, found {image_mode!r}")
        target = pick_device(device)
        compute = pick_dtype(dtype, target)
        engine = engine or EngineConfig()
        loaded = load_model(
            model,
            dtype=compute,
            device=target,
            ops=bind(resolve(target.type, compute, providers)),
            drafts=drafts_to_load(engine.draft_method),
            progress=progress,
        )
        self.config = loaded.config
        self._parts = (loaded.network, *([loaded.drafter] if loaded.drafter is not None else []))
        self.tokenizer = Tokenizer(model, vision=self.config.vision is not None)
        if self.tokenizer.vocab_size > self.config.vocab_size:
            raise ConfigError(
                f"the tokenizer has ids up to {self.tokenizer.vocab_size - 1}, vocab_size is {self.config.vocab_size}"
            )
        is_mtp = isinstance(loaded.drafter, Mtp)
        stored = "mtp" if is_mtp else "dspark" if loaded.drafter is not None else None
        self.engine = engine.with_drafts(self.config, stored).checked(self.config)
        self._inputs = InputBuilder(
            self.config,
            self.tokenizer,
            max_model_len=self.engine.max_model_len,
            image_mode=image_mode,
            limits=image_limits,
        )
        stages = loaded.drafter.num_stages if loaded.drafter is not None else 0
        row_dtype = compute if self.engine.kv_dtype == "auto" else torch.bfloat16
        families = cache_families(
            self.config,
            self.engine.block_tokens,
            row_dtype.itemsize,
            self.engine.num_drafts,
            stages,
            is_packed=self.engine.kv_dtype == "fp8",
            is_mtp=is_mtp,
        )
        if cache_bytes is None:
            accelerated = target.type != "cpu"
            step = largest_step_bytes(loaded.network, self.config, self.engine, target) if accelerated else 0
            cache_bytes = default_cache_bytes(target, step)
        self.capacity = plan_capacity(families, self.engine, cache_bytes)
        num_blocks = self.capacity.num_blocks
        forbidden = _never_generated(self.tokenizer, self.config.vocab_size)
        caches = Caches(self.config, self.engine, families, num_blocks, row_dtype, target)
        self._runner = Runner(loaded, self.engine, families, caches, target, forbidden, self.tokenizer.special.eos)
        manager = CacheManager(families, num_blocks, self.engine.prefix_caching)
        depth = DraftDepth(self.engine.num_drafts, is_fixed=self.engine.draft_depth == "fixed")
        self.core = EngineCore(Scheduler(self.engine, manager), self._runner, self.tokenizer, depth)
        self._listeners: dict[int, deque[TokenEvent]] = {}

    def generate(
        self, prompts: str | Sequence[int] | Sequence[str | Sequence[int]], params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """Continue raw prompts (text or ids); nothing is added to them. One output per prompt, in order.

        Raises InputError before anything runs if a prompt cannot be served.
        """
        many = [prompts] if _is_one_prompt(prompts) else list(prompts)
        return self._finish([self.prompt_request(prompt, params) for prompt in many])  # type: ignore[arg-type]

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        options: ChatOptions | None = None,
    ) -> RequestOutput:
        """Answer a conversation. Image parts are `{"type": "image", "image": Path | bytes | PIL image}`."""
        return self._finish([self.chat_request(messages, params, options)])[0]

    def chat_many(
        self,
        conversations: Sequence[Sequence[Message]],
        params: SamplingParams | None = None,
        options: ChatOptions | None = None,
    ) -> list[RequestOutput]:
        """Answer several conversations in one batch, in order."""
        return self._finish([self.chat_request(messages, params, options) for messages in conversations])

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        options: ChatOptions | None = None,
    ) -> TokenStream:
        """Answer a conversation token by token; the last event carries the finish reason."""
        request = self.chat_request(messages, params, options)
        if request.params.n != 1:
            raise InputError("a stream has one choice; use chat or generate for more")
        (request_id,) = self.core.add(request)
        events = self._listeners[request_id] = deque()

        def end() -> None:
            del self._listeners[request_id]
            self.core.abort(request_id)
            self.core.take(request_id)

        return TokenStream(self._step, events, end)

    @property
    def modules(self) -> dict[str, torch.nn.Module]:
        """Every module of the network and of its draft stages by name, as in the checkpoint: for hooks that watch."""
        return {name: module for part in self._parts for name, module in part.named_modules() if name}

    @property
    def stats(self) -> EngineStats:
        """Counters of the engine since it was made."""
        return self.core.stats()

    def prompt_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        fit: bool = False,
        cache_salt: bytes = b"",
    ) -> Request:
        """A raw prompt as a request. Thread-safe, as are `chat_request` and `segments_request`.

        fit: max_tokens is cut to what the context has room for. cache_salt: different ones never share a prefix.
        """
        return self._inputs.from_prompt(prompt, params or SamplingParams(), fit=fit, cache_salt=cache_salt)

    def encode_raw(self, text: str) -> list[int]:
        """Ids of raw text, special strings as special tokens."""
        return self._inputs.encode_raw(text)

    def segments_request(
        self,
        segments: Sequence[Segment],
        params: SamplingParams,
        options: ChatOptions,
        *,
        sources: Sequence[object],
        cache_salt: bytes = b"",
    ) -> Request:
        """A conversation that is encoded already, with the images of its slots; max_tokens is cut to the context."""
        return self._inputs.from_segments(segments, options, params, sources=sources, fit=True, cache_salt=cache_salt)

    def chat_request(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        options: ChatOptions | None = None,
    ) -> Request:
        """A conversation as a request: images decoded, text tokenized."""
        options = options or ChatOptions(effort="none")
        return self._inputs.from_messages(messages, options, params or SamplingParams())

    def _step(self) -> None:
        """One step; events of open streams are kept for them."""
        for event in self.core.step():
            if event.request in self._listeners:
                self._listeners[event.request].append(event)

    def _finish(self, requests: Sequence[Request]) -> list[RequestOutput]:
        ids: list[int] = []
        try:
            for request in requests:
                ids += self.core.add(request)
            while not all(self.core.is_finished(request_id) for request_id in ids):
                self._step()
            return [self.core.take(request_id) for request_id in ids]
        except BaseException:
            # A refused request, a broken step or an interrupt: nothing is left behind.
            for request_id in ids:
                self.core.abort(request_id)
                self.core.take(request_id)
            raise


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
