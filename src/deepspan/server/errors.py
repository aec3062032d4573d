"""What goes wrong, as the API says it: status and body.

Invariant: a body names the field at fault and holds neither paths nor addresses of this machine nor long input.
Called by every endpoint of `server`.
"""

import logging
import re
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from deepspan.errors import ContextError, DeepspanError, OverloadedError

log = logging.getLogger(__name__)

MAX_MESSAGE = 2000
MAX_ITEMS = 10
RETRY_AFTER_SECONDS = 1
_FIELD = re.compile(r"([a-z_]+(?:\[\d+\]|\.[a-zA-Z_]+)*)(?=[ :])")
_BRANCHES = frozenset(("str", "int", "float", "bool", "constrained-str"))
_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "TimeoutError",
    413: "PayloadTooLargeError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiError(Exception):
    """An answer that is no success. param: path of the field at fault. code: a machine's word, the status if None."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None

    @property
    def kind(self) -> str:
        return _TYPES.get(self.status, "BadRequestError" if self.status < 500 else "InternalServerError")

    def body(self) -> dict[str, Any]:
        """As the OpenAI API and its clients have it."""
        message = self.message if len(self.message) <= MAX_MESSAGE else self.message[:MAX_MESSAGE] + "..."
        return {"error": {"message": message, "type": self.kind, "param": self.param, "code": self.code or self.status}}

    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(RETRY_AFTER_SECONDS)} if self.status in (429, 503) else {}


def api_error(error: BaseException) -> ApiError:
    """The answer to any exception. One that nobody foresaw is logged, and its text stays here."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ValidationError):
        return _of_validation(error)
    if isinstance(error, DeepspanError):
        return _of_own(error)
    if isinstance(error, TimeoutError):
        return ApiError(status=504, message="the request took longer than this server allows")
    log.error("a request failed", exc_info=error)
    return ApiError(status=500, message="the server failed to answer this request")


def _of_own(error: DeepspanError) -> ApiError:
    if isinstance(error, OverloadedError):
        return ApiError(status=429, message=str(error))
    if isinstance(error, ContextError):
        return ApiError(status=400, message=str(error), param="messages", code="context_length_exceeded")
    found = _FIELD.match(str(error))
    return ApiError(status=400, message=str(error), param=found.group() if found else None)


def _of_validation(error: ValidationError) -> ApiError:
    items = error.errors(include_url=False, include_context=False, include_input=False)
    lines = [f"{_path(item['loc'])}: {item['msg']}" for item in items[:MAX_ITEMS]]
    if len(items) > MAX_ITEMS:
        lines.append(f"and {len(items) - MAX_ITEMS} more")
    return ApiError(status=400, message="; ".join(lines), param=_path(items[0]["loc"]))


def _path(location: tuple[int | str, ...]) -> str:
    """Path of a field; the names of a union's branches, which stand between, are no part of it."""
    path = ""
    for part in location:
        if isinstance(part, str) and (part in _BRANCHES or not part.isidentifier()):
            continue
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path[:200]
