"""`/v1/messages`: the Anthropic form of the API.

Owns the translation of requests into chat requests and of answers into content blocks. What has no counterpart is
refused by name. Called by `server.app`.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any

from pydantic import Field

from deepspan.core.output import RequestOutput
from deepspan.server.answers import usage
from deepspan.server.blocks import Block, BlockEvent, block_events, blocks_of, output_of
from deepspan.server.errors import ApiError
from deepspan.server.fields import MAX_MESSAGES, MAX_STOPS, ChatFields, Fields, Share
from deepspan.server.jobs import Job, Service
from deepspan.server.transport import data_event
from deepspan.text.tools import strict_json

_STOPS = {"length": "max_tokens", "stop": "end_turn"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class MessagesFields(Fields):
    """Request of `/v1/messages` and, without `max_tokens`, of `/v1/messages/count_tokens`."""

    model: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    system: str | list[dict[str, Any]] | None = None
    temperature: Share | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31)] | None = None
    stop_sequences: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


def chat_fields(fields: MessagesFields) -> ChatFields:
    """The chat request that means the same. Raises ApiError naming what has no counterpart."""
    chat: dict[str, Any] = {
        "messages": _messages(fields),
        "max_completion_tokens": fields.max_tokens,
        "temperature": fields.temperature,
        "top_p": fields.top_p,
        "top_k": fields.top_k,
        "stop": fields.stop_sequences,
        "thinking": fields.thinking or {"type": "disabled"},
    }
    effort = (fields.output_config or {}).get("effort")
    if effort is not None and fields.thinking:
        chat["reasoning_effort"] = effort
    if fields.tools:
        chat["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(fields.tools)]
    if fields.tool_choice is not None:
        chat |= _tool_choice(fields.tool_choice)
    return ChatFields.model_validate({name: value for name, value in chat.items() if value is not None})


class MessagesAnswer:
    """Answer to one request."""

    def __init__(self, service: Service, fields: MessagesFields, chat: ChatFields, job: Job, model: str) -> None:
        self._service, self._fields, self._job, self._model = service, fields, job, model
        self._one_call = chat.parallel_tool_calls is False

    async def whole(self) -> dict[str, Any]:
        """The `message` object."""
        (output,) = await self._service.finish(self._job)
        content = [_content(block) for block in blocks_of(output, one_call=self._one_call)]
        return self._message(content) | self._ending(output) | {"usage": _usage(output)}

    async def chunks(self) -> AsyncGenerator[str]:
        """Server-sent events from `message_start` to `message_stop`."""
        prompt = len(self._job.requests[0].token_ids)
        started = self._message([]) | {"stop_reason": None, "stop_sequence": None}
        started["usage"] = {"input_tokens": prompt, "output_tokens": 0}
        yield _event("message_start", message=started)
        yield _event("ping")
        async with aclosing(block_events(self._service, self._job, one_call=self._one_call)) as events:
            async for event in events:
                for text in _block_events(event):
                    yield text
        output = output_of(self._job)
        yield _event("message_delta", delta=self._ending(output), usage=_usage(output))
        yield _event("message_stop")

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"msg_{self._job.id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
        }

    def _ending(self, output: RequestOutput) -> dict[str, Any]:
        stop = output.stop if isinstance(output.stop, str) else None
        called = output.finish_reason == "stop" and any(call.is_complete for call in output.calls)
        reason = "tool_use" if called else "stop_sequence" if stop else _STOPS[output.finish_reason]
        return {"stop_reason": reason, "stop_sequence": stop}


def error_body(error: ApiError) -> dict[str, Any]:
    """An error as clients of this form read it."""
    kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
    kind = kinds.get(error.status) or ("invalid_request_error" if error.status < 500 else "api_error")
    if error.status == 503:
        kind = "overloaded_error"
    return {"type": "error", "error": {"type": kind, "message": error.body()["error"]["message"]}}


def failed(error: ApiError) -> list[str]:
    """The last event of a stream that broke."""
    return [data_event(error_body(error), "error")]


def _event(name: str, **fields: Any) -> str:
    return data_event({"type": name, **fields}, name)


def _block_events(event: BlockEvent) -> list[str]:
    block = event.block
    if event.what == "open":
        empty = _content(Block(index=0, kind=block.kind, name=block.name, call_id=block.call_id))
        return [_event("content_block_start", index=block.index, content_block=empty)]
    if event.what == "close":
        signed = {"type": "signature_delta", "signature": ""}
        signature = (
            [_event("content_block_delta", index=block.index, delta=signed)] if block.kind == "reasoning" else []
        )
        return [*signature, _event("content_block_stop", index=block.index)]
    match block.kind:
        case "reasoning":
            delta = {"type": "thinking_delta", "thinking": event.delta}
        case "text":
            delta = {"type": "text_delta", "text": event.delta}
        case "call":
            delta = {"type": "input_json_delta", "partial_json": event.delta}
    return [_event("content_block_delta", index=block.index, delta=delta)]


def _content(block: Block) -> dict[str, Any]:
    match block.kind:
        case "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        case "text":
            return {"type": "text", "text": block.text}
        case "call":
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _input(block.text)}


def _input(arguments: str) -> Any:
    """Arguments as an object; what was cut off is there as far as it came, under a name of its own."""
    try:
        return strict_json(arguments) if arguments else {}
    except ValueError:
        return {"partial_json": arguments}


def _usage(output: RequestOutput) -> dict[str, Any]:
    counted = usage([output], 1)
    return {
        "input_tokens": counted["prompt_cache_miss_tokens"],
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counted["prompt_cache_hit_tokens"],
        "output_tokens": counted["completion_tokens"],
    }


def _refused(where: str, text: str) -> ApiError:
    return ApiError(status=400, message=f"{where}: {text}", param=where)


def _messages(fields: MessagesFields) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if fields.system:
        system = fields.system
        content = system if isinstance(system, str) else [_part(b, f"system[{i}]") for i, b in enumerate(system)]
        messages.append({"role": "system", "content": content})
    for index, message in enumerate(fields.messages):
        where, role, content = f"messages[{index}]", message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise _refused(f"{where}.role", f"must be user or assistant, found {str(role)[:40]!r}")
        if isinstance(content, str):
            blocks: Sequence[Any] = [{"type": "text", "text": content}]
        elif isinstance(content, list):
            blocks = content
        else:
            raise _refused(f"{where}.content", "must be a string or a list of blocks")
        for number, block in enumerate(blocks):
            if not isinstance(block, Mapping):
                raise _refused(f"{where}.content[{number}]", "must be an object")
        if role == "assistant":
            is_last = index == len(fields.messages) - 1
            messages.append(_assistant(blocks, where) | ({"prefix": True} if is_last else {}))
        else:
            messages += _user(blocks, where, role=role)
    return messages


def _user(blocks: Sequence[Mapping[str, Any]], where: str, *, role: str) -> list[dict[str, Any]]:
    """Results of tools come first, as messages of their own."""
    messages: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        place = f"{where}.content[{number}]"
        if block.get("type") != "tool_result":
            parts.append(_part(block, place))
            continue
        content = block.get("content")
        if isinstance(content, list):
            content = [_part(inner, f"{place}.content[{i}]") for i, inner in enumerate(content)]
        messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content or ""})
    if parts or not messages:
        messages.append({"role": role, "content": parts})
    return messages


def _assistant(blocks: Sequence[Mapping[str, Any]], where: str) -> dict[str, Any]:
    texts: list[dict[str, Any]] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        match block.get("type"):
            case "thinking":
                reasoning.append(str(block.get("thinking") or ""))
            case "redacted_thinking":
                continue  # nobody but its author can read it
            case "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input") or {}}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case _:
                texts.append(_part(block, f"{where}.content[{number}]"))
    message: dict[str, Any] = {"role": "assistant", "content": texts or ""}
    if reasoning:
        message["reasoning_content"] = "\n\n".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def _part(block: Any, where: str) -> dict[str, Any]:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if kind == "text":
        return {"type": "text", "text": block.get("text")}
    if kind != "image":
        raise _refused(where, f"blocks of type {str(kind)[:40]!r} are not supported here")
    source = block.get("source")
    match source.get("type") if isinstance(source, Mapping) else None:
        case "base64":
            address = f"data:{source.get('media_type') or 'image/png'};base64,{source.get('data') or ''}"
        case "url":
            address = source.get("url")
        case _:
            raise _refused(f"{where}.source", "must be of type base64 or url")
    return {"type": "image_url", "image_url": {"url": address}}


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise _refused(f"{where}.type", f"tools of type {str(tool.get('type'))[:40]!r} are not supported")
    schema = tool.get("input_schema")
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": schema}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _tool_choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    kind = choice.get("type")
    fields: dict[str, Any] = {}
    if kind == "tool":
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif isinstance(kind, str) and kind in _CHOICES:
        fields["tool_choice"] = _CHOICES[kind]
    else:
        raise _refused("tool_choice.type", f"must be auto, any, tool or none, found {str(kind)[:40]!r}")
    if choice.get("disable_parallel_tool_use"):
        fields["parallel_tool_calls"] = False
    return fields
