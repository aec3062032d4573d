"""`/v1/responses`: the newer form of the OpenAI API, without storage.

Owns the translation of input items into chat messages, and of answers into output items and their events. Called by
`server.app`.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any

from pydantic import Field

from deepspan.core.output import RequestOutput
from deepspan.core.sampling import MAX_LOGPROBS
from deepspan.server.answers import usage
from deepspan.server.blocks import Block, BlockEvent, block_events, blocks_of, output_of
from deepspan.server.errors import ApiError
from deepspan.server.fields import MAX_MESSAGES, ChatFields, Fields
from deepspan.server.jobs import Job, Service
from deepspan.server.transport import data_event

_ROLES = ("user", "assistant", "system", "developer")
_PARTS = {"input_text": "text", "output_text": "text", "text": "text"}


class ResponsesFields(Fields):
    """Request of `/v1/responses`."""

    model: str | None = None
    input: str | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    include: list[str] | None = None
    truncation: str | None = None


def chat_fields(fields: ResponsesFields) -> ChatFields:
    """The chat request that means the same. Raises ApiError naming what has no counterpart."""
    if fields.truncation not in (None, "disabled"):
        raise _refused("truncation", "prompts are not cut")
    if fields.top_logprobs:
        raise _refused("top_logprobs", "not supported here: use /v1/chat/completions")
    chat: dict[str, Any] = {
        "messages": _messages(fields),
        "max_completion_tokens": fields.max_output_tokens,
        "temperature": fields.temperature,
        "top_p": fields.top_p,
        "parallel_tool_calls": fields.parallel_tool_calls,
        "reasoning_effort": (fields.reasoning or {}).get("effort"),
        "response_format": _format((fields.text or {}).get("format")),
    }
    if fields.tools:
        chat["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(fields.tools)]
    if fields.tool_choice is not None:
        chat["tool_choice"] = _tool_choice(fields.tool_choice)
    return ChatFields.model_validate({name: value for name, value in chat.items() if value is not None})


class ResponsesAnswer:
    """Answer to one request."""

    def __init__(self, service: Service, fields: ResponsesFields, chat: ChatFields, job: Job, model: str) -> None:
        self._service, self._fields, self._job, self._model = service, fields, job, model
        self._one_call = chat.parallel_tool_calls is False
        self._number = 0

    async def whole(self) -> dict[str, Any]:
        """The `response` object."""
        (output,) = await self._service.finish(self._job)
        return self._ended(output, [self._item(block) for block in blocks_of(output, one_call=self._one_call)])

    async def chunks(self) -> AsyncGenerator[str]:
        """Server-sent events from `response.created` to `response.completed` or `response.incomplete`."""
        begun = self._response("in_progress", [])
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)
        items: list[dict[str, Any]] = []
        async with aclosing(block_events(self._service, self._job, one_call=self._one_call)) as events:
            async for event in events:
                for text in self._block_events(event):
                    yield text
                if event.what == "close":
                    items.append(self._item(event.block))
        ended = self._ended(output_of(self._job), items)
        yield self._event(f"response.{ended['status']}", response=ended)

    def failed(self, error: ApiError) -> list[str]:
        """The last event of a stream that broke."""
        body = self._response("failed", []) | {"error": {"code": "server_error", "message": error.message}}
        return [self._event("response.failed", response=body)]

    def _ended(self, output: RequestOutput, items: list[dict[str, Any]]) -> dict[str, Any]:
        cut = output.finish_reason == "length"
        body = self._response("incomplete" if cut else "completed", items)
        counted = usage([output], 1)
        body["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        body["usage"] = {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": counted["prompt_cache_hit_tokens"]},
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": counted["completion_tokens_details"],
            "total_tokens": counted["total_tokens"],
        }
        return body

    def _response(self, status: str, items: list[dict[str, Any]]) -> dict[str, Any]:
        fields = self._fields
        return {
            "id": f"resp_{self._job.id}",
            "object": "response",
            "created_at": self._job.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "model": self._model,
            "output": items,
            "parallel_tool_calls": fields.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": (fields.reasoning or {}).get("effort"), "summary": None},
            "store": False,
            "temperature": self._job.requests[0].params.temperature,
            "text": fields.text or {"format": {"type": "text"}},
            "tool_choice": fields.tool_choice or "auto",
            "tools": fields.tools or [],
            "top_p": self._job.requests[0].params.top_p,
            "truncation": "disabled",
            "usage": None,
            "metadata": (fields.model_extra or {}).get("metadata") or {},
        }

    def _event(self, kind: str, /, **values: Any) -> str:
        number, self._number = self._number, self._number + 1
        return data_event({"type": kind, "sequence_number": number, **values}, kind)

    def _block_events(self, event: BlockEvent) -> list[str]:
        block = event.block
        item = self._item(block)
        at = {"output_index": block.index, "item_id": item["id"]}
        if block.kind == "call":
            return self._call_events(event, item, at)
        kind = "reasoning_text" if block.kind == "reasoning" else "output_text"
        part = {"content_index": 0, **at}
        extra = {} if block.kind == "reasoning" else {"logprobs": []}
        if event.what == "open":
            opened = item | {"status": "in_progress", "content": []}
            empty = _part(kind, "")
            return [
                self._event("response.output_item.added", output_index=block.index, item=opened),
                self._event("response.content_part.added", **part, part=empty),
            ]
        if event.what == "add":
            return [self._event(f"response.{kind}.delta", **part, delta=event.delta, **extra)]
        return [
            self._event(f"response.{kind}.done", **part, text=block.text, **extra),
            self._event("response.content_part.done", **part, part=_part(kind, block.text)),
            self._event("response.output_item.done", output_index=block.index, item=item),
        ]

    def _call_events(self, event: BlockEvent, item: dict[str, Any], at: dict[str, Any]) -> list[str]:
        name = "response.function_call_arguments"
        if event.what == "open":
            opened = item | {"status": "in_progress", "arguments": ""}
            return [self._event("response.output_item.added", output_index=event.block.index, item=opened)]
        if event.what == "add":
            return [self._event(f"{name}.delta", **at, delta=event.delta)]
        return [
            self._event(f"{name}.done", **at, name=event.block.name, arguments=event.block.text),
            self._event("response.output_item.done", output_index=event.block.index, item=item),
        ]

    def _item(self, block: Block) -> dict[str, Any]:
        own = f"{self._job.id}_{block.index}"
        status = "completed" if block.is_complete else "incomplete"
        match block.kind:
            case "reasoning":
                content = [_part("reasoning_text", block.text)]
                return {"id": f"rs_{own}", "type": "reasoning", "summary": [], "content": content, "status": status}
            case "text":
                content = [_part("output_text", block.text)]
                head = {"id": f"msg_{own}", "type": "message", "role": "assistant"}
                return {**head, "status": status, "content": content}
            case "call":
                head = {"id": f"fc_{own}", "type": "function_call", "call_id": block.call_id}
                return {**head, "name": block.name, "arguments": block.text, "status": status}


def _part(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, "text": text, **({} if kind == "reasoning_text" else {"annotations": [], "logprobs": []})}


def _refused(where: str, text: str) -> ApiError:
    return ApiError(status=400, message=f"{where}: {text}", param=where)


def _messages(fields: ResponsesFields) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if fields.instructions:
        messages.append({"role": "system", "content": fields.instructions})
    if isinstance(fields.input, str):
        return [*messages, {"role": "user", "content": fields.input}]
    for index, item in enumerate(fields.input):
        _add_item(messages, item, f"input[{index}]")
    # Reasoning that no answer follows belongs to nothing.
    return [message for message in messages if not message.get("is_open") or _has_answer(message)]


def _has_answer(message: dict[str, Any]) -> bool:
    message.pop("is_open")
    return bool(message.get("content") or message.get("tool_calls"))


def _add_item(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    """Reasoning, text and calls of one turn of the assistant are items of their own there, and one message here."""
    match item.get("type", "message"):
        case "message":
            role = item.get("role")
            if role not in _ROLES:
                raise _refused(f"{where}.role", f"must be one of {', '.join(_ROLES)}, found {str(role)[:40]!r}")
            content = _parts(item.get("content"), f"{where}.content")
            if role == "assistant" and messages and messages[-1].get("is_open") and not messages[-1]["content"]:
                messages[-1]["content"] = content
            else:
                messages.append(
                    {"role": role, "content": content, **({"is_open": True} if role == "assistant" else {})}
                )
        case "reasoning":
            texts = [str(part.get("text") or "") for part in _list(item.get("content")) + _list(item.get("summary"))]
            _open_assistant(messages, fresh=True)["reasoning_content"] = "\n\n".join(texts)
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            _open_assistant(messages, fresh=False).setdefault("tool_calls", []).append(call)
        case "function_call_output":
            output = _parts(item.get("output"), f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        case kind:
            raise _refused(f"{where}.type", f"items of type {str(kind)[:40]!r} are not supported")


def _open_assistant(messages: list[dict[str, Any]], *, fresh: bool) -> dict[str, Any]:
    if fresh or not messages or not messages[-1].get("is_open"):
        messages.append({"role": "assistant", "content": "", "is_open": True})
    return messages[-1]


def _list(value: Any) -> list[Mapping[str, Any]]:
    return [part for part in value if isinstance(part, Mapping)] if isinstance(value, list) else []


def _parts(content: Any, where: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise _refused(where, "must be a string or a list of parts")
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        place = f"{where}[{index}]"
        if kind in _PARTS:
            parts.append({"type": "text", "text": part.get("text")})
        elif kind == "refusal":
            parts.append({"type": "text", "text": part.get("refusal")})
        elif kind == "input_image" and part.get("image_url") is not None:
            parts.append({"type": "input_image", "image_url": part["image_url"], "detail": part.get("detail")})
        else:
            raise _refused(place, f"parts of type {str(kind)[:40]!r} are not supported (images need image_url)")
    return parts


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise _refused(f"{where}.type", f"tools of type {str(tool.get('type'))[:40]!r} are not supported")
    function = {name: tool.get(name) for name in ("name", "description", "parameters", "strict")}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _tool_choice(choice: str | dict[str, Any]) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function" and "function" not in choice:
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _format(value: Any) -> dict[str, Any] | None:
    if not isinstance(value, Mapping) or value.get("type") != "json_schema":
        return dict(value) if isinstance(value, Mapping) else None
    return {"type": "json_schema", "json_schema": {"name": value.get("name"), "schema": value.get("schema")}}
