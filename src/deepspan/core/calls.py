"""Calls of tools in a model's output, whole and as they arrive.

Made by `text.parser`, carried by token events and outputs, read by the server and the Python API.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """arguments: text of a JSON object; not closed where the output was cut off (is_complete is False then)."""

    name: str
    arguments: str
    is_complete: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDelta:
    """A piece of one call. name: set on the first piece of a call, None afterwards. arguments: to be appended."""

    index: int
    name: str | None
    arguments: str
