"""The application: routes, keys, errors. Everything that answers HTTP is registered here.

Invariants: only the routes in `OPEN_PATHS` answer without a key; whatever a handler raises becomes an answer in the
form of the API that was called; a request whose client is gone is cancelled. Called by `server.run` and by tests.
"""

import hashlib
import hmac
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from uuid import uuid4

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deepspan.server import messages, responses, tools_api
from deepspan.server.chat import ChatAnswer
from deepspan.server.completions import CompletionAnswer
from deepspan.server.errors import ApiError, api_error
from deepspan.server.fields import (
    ChatFields,
    CompletionFields,
    DetokenizeFields,
    Fields,
    SamplingFields,
    TokenizeFields,
    unknown_fields,
)
from deepspan.server.jobs import Job, Service
from deepspan.server.transport import DONE, EventStream, data_event, dump_json, read_json, until_gone
from deepspan.version import __version__

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset(("/health", "/ping", "/version"))
CLIENT_GONE = 499
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")
F = TypeVar("F", bound=Fields)
Answer = ChatAnswer | CompletionAnswer | responses.ResponsesAnswer | messages.MessagesAnswer


def create_app(service: Service) -> ASGIApp:
    """The ASGI application of a service. It owns neither the model nor its threads."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        yield
        await service.media.aclose()

    app = FastAPI(title="deepspan", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    routes = _Routes(app, service)
    routes.add("POST", ("/v1/chat/completions", "/chat/completions", "/beta/chat/completions"), _chat, ChatFields)
    routes.add("POST", ("/v1/completions", "/completions", "/beta/completions"), _completions, CompletionFields)
    routes.add("POST", ("/v1/responses",), _responses, responses.ResponsesFields)
    routes.add("POST", ("/v1/messages", "/anthropic/v1/messages"), _messages, messages.MessagesFields)
    routes.add("POST", ("/v1/messages/count_tokens",), _count_tokens, messages.MessagesFields)
    routes.add("POST", ("/v1/chat/completions/render",), _render, ChatFields)
    routes.add("POST", ("/tokenize",), _tokenize, TokenizeFields)
    routes.add("POST", ("/detokenize",), _detokenize, DetokenizeFields)
    routes.add("GET", ("/v1/models", "/models"), _models)
    routes.add("GET", ("/v1/models/{name:path}",), _model)
    routes.add("GET", ("/health", "/ping"), _health)
    routes.add("POST", ("/ping",), _health)
    routes.add("GET", ("/load",), _load)
    routes.add("GET", ("/version",), _version)
    routes.add("GET", ("/metrics",), _metrics)
    app.add_exception_handler(HTTPException, _http_error)
    guarded: ASGIApp = _Guard(app, service)
    if service.settings.cors_origins:
        guarded = CORSMiddleware(
            guarded, allow_origins=service.settings.cors_origins, allow_methods=["*"], allow_headers=["*"]
        )
    return guarded


class _Routes:
    """Registers endpoints, each wrapped so that it always answers."""

    def __init__(self, app: FastAPI, service: Service) -> None:
        self._app, self._service = app, service
        self._schemas: dict[str, Any] = {}
        self._describe = app.openapi
        app.openapi = self._description  # type: ignore[method-assign]

    def add(
        self,
        method: str,
        paths: tuple[str, ...],
        endpoint: Callable[..., Awaitable[Response]],
        fields: type[Fields] | None = None,
    ) -> None:
        async def answer(request: Request) -> Response:
            return await _answer(self._service, request, endpoint, fields)

        extra = {"requestBody": self._body(fields)} if fields is not None else None
        for number, path in enumerate(paths):
            self._app.add_api_route(
                path,
                answer,
                methods=[method],
                name=f"{method} {path}",
                operation_id=f"{method.lower()}_{path.strip('/').replace('/', '_')}",
                include_in_schema=number == 0,
                openapi_extra=extra,
                responses={status: {"description": "error"} for status in (400, 401, 404, 413, 429, 500, 503)},
            )

    def _body(self, fields: type[Fields]) -> dict[str, Any]:
        """Bodies are read by `transport.read_json`, with its limits, so their description is made here too."""
        schema = fields.model_json_schema(ref_template="#/components/schemas/{model}")
        self._schemas |= schema.pop("$defs", {}) | {fields.__name__: schema}
        content = {"schema": {"$ref": f"#/components/schemas/{fields.__name__}"}}
        return {"required": True, "content": {"application/json": content}}

    def _description(self) -> dict[str, Any]:
        description = self._describe()
        description.setdefault("components", {}).setdefault("schemas", {}).update(self._schemas)
        return description


async def _answer(
    service: Service, request: Request, endpoint: Callable[..., Awaitable[Response]], fields: type[Fields] | None
) -> Response:
    is_messages = "/messages" in request.url.path
    try:
        if fields is None:
            return await endpoint(service, request)
        body = await read_json(request, service.settings.max_body_bytes)
        parsed = fields.model_validate(body)
        unknown = unknown_fields(parsed, strict=service.settings.strict)
        response = await until_gone(request, endpoint(service, parsed))  # type: ignore[arg-type]
        if unknown:
            log.warning("fields that nobody knows: %s", ", ".join(unknown))
            response.headers["x-deepspan-unknown-fields"] = _header(unknown)
        return response
    except ClientDisconnect:
        log.info("the client has gone: %s", request.url.path)
        return Response(status_code=CLIENT_GONE)
    except Exception as error:
        found = api_error(error)
        service.metrics.refuse(found.status)
        return _error(found, is_messages=is_messages)


def _header(names: list[str]) -> str:
    return ", ".join(re.sub(r"[^A-Za-z0-9_.\-]", "?", name) for name in names[:20])


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(dump_json(value), status_code=status, headers=headers, media_type="application/json")


def _error(error: ApiError, *, is_messages: bool = False) -> Response:
    body = messages.error_body(error) if is_messages else error.body()
    return _json(body, error.status, error.headers())


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = {404: "there is nothing at this path", 405: "this path does not take that method"}
    status = error.status_code
    found = ApiError(status=status, message=text.get(status, error.detail))
    response = _error(found, is_messages="/messages" in request.url.path)
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response


def _check_stream(fields: SamplingFields) -> None:
    options = fields.stream_options
    if options is not None and not fields.stream:
        raise ApiError(status=400, message="stream_options needs stream true", param="stream_options")
    if options is not None and options.continuous_usage_stats:
        raise ApiError(
            status=400,
            message="continuous_usage_stats is not supported: usage comes with the last chunk",
            param="stream_options.continuous_usage_stats",
        )


async def _chat(service: Service, fields: ChatFields) -> Any:
    model = service.check_model(fields.model)
    _check_stream(fields)
    if fields.echo:
        raise ApiError(status=400, message="echo is not supported here: use /v1/completions", param="echo")
    job = await service.chat_job(fields)
    answer = ChatAnswer(service, fields, job, model)
    return await _told(service, job, answer, _chat_failed, stream=fields.stream)


async def _completions(service: Service, fields: CompletionFields) -> Any:
    model = service.check_model(fields.model)
    _check_stream(fields)
    job = await service.completion_job(fields)
    answer = CompletionAnswer(service, fields, job, model)
    return await _told(service, job, answer, _chat_failed, stream=fields.stream)


async def _responses(service: Service, fields: responses.ResponsesFields) -> Any:
    model = service.check_model(fields.model)
    chat = responses.chat_fields(fields)
    job = await service.chat_job(chat)
    answer = responses.ResponsesAnswer(service, fields, chat, job, model)
    return await _told(service, job, answer, answer.failed, stream=fields.stream)


async def _messages(service: Service, fields: messages.MessagesFields) -> Any:
    model = service.check_model(fields.model)
    if fields.max_tokens is None:
        raise ApiError(status=400, message="max_tokens is required", param="max_tokens")
    chat = messages.chat_fields(fields)
    job = await service.chat_job(chat)
    answer = messages.MessagesAnswer(service, fields, chat, job, model)
    return await _told(service, job, answer, messages.failed, stream=fields.stream)


async def _count_tokens(service: Service, fields: messages.MessagesFields) -> Response:
    service.check_model(fields.model)
    job = await service.chat_job(messages.chat_fields(fields))
    return _json({"input_tokens": len(job.requests[0].token_ids)})


async def _render(service: Service, fields: ChatFields) -> Response:
    return _json(await tools_api.render(service, fields))


async def _tokenize(service: Service, fields: TokenizeFields) -> Response:
    return _json(await tools_api.tokenize(service, fields))


async def _detokenize(service: Service, fields: DetokenizeFields) -> Response:
    return _json(await tools_api.detokenize(service, fields))


async def _models(service: Service, _: Request) -> Response:
    return _json({"object": "list", "data": [tools_api.model_object(service, n) for n in service.settings.names]})


async def _model(service: Service, request: Request) -> Response:
    name = service.check_model(request.path_params["name"])
    return _json(tools_api.model_object(service, name))


async def _health(service: Service, _: Request) -> Response:
    return Response(status_code=200 if service.llm.is_alive and not service.draining else 503)


async def _load(service: Service, _: Request) -> Response:
    return _json({"server_load": service.num_active})


async def _version(_: Service, __: Request) -> Response:
    return _json({"version": __version__})


async def _metrics(service: Service, _: Request) -> Response:
    return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _told(
    service: Service, job: Job, answer: Answer, failed: Callable[[ApiError], list[str]], *, stream: bool | None
) -> Response:
    """The answer to a job, whole or streamed. failed: last events of a stream that breaks."""
    if not stream:
        return _json(await answer.whole())
    await service.start(job)

    def on_error(error: BaseException) -> list[str]:
        return failed(api_error(error))

    return EventStream(answer.chunks(), on_error, job.close, service.settings.keep_alive)


def _chat_failed(error: ApiError) -> list[str]:
    return [data_event(error.body()), DONE]


class _Guard:
    """Keys and request ids, before anything else is done for a request."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        settings = service.settings
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in settings.api_keys]
        self._open = OPEN_PATHS if settings.guard_metrics else OPEN_PATHS | {"/metrics"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        asked = headers.get("x-request-id", "")
        request_id = asked if _REQUEST_ID.fullmatch(asked) else uuid4().hex

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        if self._digests and scope["path"] not in self._open and not self._knows(headers):
            error = ApiError(status=401, message="the API key is missing or wrong")
            response = _error(error, is_messages="/messages" in scope["path"])
            response.headers["www-authenticate"] = "Bearer"
            await response(scope, receive, send_marked)
            return
        await self._app(scope, receive, send_marked)

    def _knows(self, headers: Headers) -> bool:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest = hashlib.sha256(given.encode()).digest()
        # Every key is compared, so that the time says nothing about which one nearly fits.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)
