"""`/v1/chat/completions`: answers whole and in chunks.

Called by `server.app`. What a chunked answer adds up to is the whole answer.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from deepspan.core.output import RequestOutput, TokenEvent
from deepspan.server.answers import (
    CallIds,
    call_delta,
    call_object,
    finish_reason,
    prompt_logprobs,
    token_logprobs,
    usage,
)
from deepspan.server.fields import ChatFields
from deepspan.server.jobs import Job, Service, served
from deepspan.server.transport import DONE, data_event


class ChatAnswer:
    """Answer to one chat request."""

    def __init__(self, service: Service, fields: ChatFields, job: Job, model: str) -> None:
        self._service, self._fields, self._job = service, fields, job
        self._tokenizer = service.llm.llm.tokenizer
        self._ids = CallIds()
        self._shows_reasoning = fields.include_reasoning is not False
        self._one_call = fields.parallel_tool_calls is False
        self._is_named = isinstance(fields.tool_choice, dict) and fields.tool_choice.get("type") != "allowed_tools"
        self._head = {"id": f"chatcmpl-{job.id}", "created": job.created, "model": model}

    async def whole(self) -> dict[str, Any]:
        """The `chat.completion` object."""
        outputs = await self._service.finish(self._job)
        body: dict[str, Any] = {
            "object": "chat.completion",
            **self._head,
            "choices": [self._choice(index, output) for index, output in enumerate(outputs)],
            "usage": usage(outputs, len(outputs)),
            "system_fingerprint": None,
            "service_tier": None,
        }
        if outputs[0].prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(self._tokenizer, outputs[0])
        if self._fields.return_token_ids:
            body["prompt_token_ids"] = self._job.requests[0].token_ids.tolist()
        return body

    async def chunks(self) -> AsyncGenerator[str]:
        """Server-sent events: role, reasoning, content, calls, reason; usage if asked for; `[DONE]`."""
        options = self._fields.stream_options
        with_usage = bool(options and options.include_usage)
        num_choices = self._job.requests[0].params.n
        for choice in range(num_choices):
            yield self._chunk(choice, {"role": "assistant", "content": ""})
        waiting: dict[int, list[dict[str, Any]]] = {choice: [] for choice in range(num_choices)}
        tokens: dict[int, list[int]] = {choice: [] for choice in range(num_choices)}
        async with aclosing(self._service.events(self._job)) as events:
            async for event in events:
                choice = event.request
                if event.logprobs is not None and (self._shows_reasoning or not event.is_reasoning):
                    waiting[choice].append(token_logprobs(self._tokenizer, event.logprobs))
                if event.token_id is not None and (self._shows_reasoning or not event.is_reasoning):
                    tokens[choice].append(event.token_id)
                extra: dict[str, Any] = {}
                if waiting[choice]:
                    extra["logprobs"] = {"content": waiting[choice]}
                if self._fields.return_token_ids:
                    extra["token_ids"] = tokens[choice]
                for delta in self._deltas(event):
                    yield self._chunk(choice, delta, **extra)
                    waiting[choice], tokens[choice], extra = [], [], {}
                if event.finish_reason is not None:
                    output = served(self._job.streams[choice].output)
                    reason = finish_reason(output, is_named=self._is_named)
                    yield self._chunk(choice, {}, finish_reason=reason, stop_reason=output.stop, **extra)
        if with_usage:
            outputs = self._job.outputs
            body = {"object": "chat.completion.chunk", **self._head, "choices": []}
            yield data_event(body | {"usage": usage(outputs, len(outputs))})
        yield DONE

    def _deltas(self, event: TokenEvent) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        if event.reasoning and self._shows_reasoning:
            deltas.append({"reasoning_content": event.reasoning, "reasoning": event.reasoning})
        if event.text:
            deltas.append({"content": event.text})
        for call in event.calls:
            if not (self._one_call and call.index):
                deltas.append({"tool_calls": [call_delta(call, self._ids.of(event.request, call.index))]})
        return deltas

    def _chunk(self, choice: int, delta: dict[str, Any], **fields: Any) -> str:
        one = {"index": choice, "delta": delta, "finish_reason": None, **fields}
        return data_event({"object": "chat.completion.chunk", **self._head, "choices": [one]})

    def _choice(self, index: int, output: RequestOutput) -> dict[str, Any]:
        shown = output.calls[:1] if self._one_call else output.calls
        calls = [call_object(call, self._ids.of(index, number)) for number, call in enumerate(shown)]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": output.text or (None if calls else self._nothing(output)),
        }
        if output.reasoning and self._shows_reasoning:
            message |= {"reasoning_content": output.reasoning, "reasoning": output.reasoning}
        if calls:
            message["tool_calls"] = calls
        message["refusal"] = None
        choice: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(output),
            "finish_reason": finish_reason(output, is_named=self._is_named),
            "stop_reason": output.stop,
        }
        if self._fields.return_token_ids:
            choice["token_ids"] = list(output.token_ids[self._first_shown(output) :])
        return choice

    def _nothing(self, output: RequestOutput) -> str | None:
        """Content of an answer without text: null where the output never left the reasoning."""
        return None if output.num_reasoning_tokens else ""

    def _logprobs(self, output: RequestOutput) -> dict[str, Any] | None:
        if output.logprobs is None:
            return None
        shown = output.logprobs[self._first_shown(output) :]
        return {"content": [token_logprobs(self._tokenizer, found) for found in shown]}

    def _first_shown(self, output: RequestOutput) -> int:
        """Number of the first token that the client may see; reasoning comes first."""
        return 0 if self._shows_reasoning else output.num_reasoning_tokens
