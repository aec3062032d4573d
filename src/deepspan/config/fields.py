"""Typed reading of a JSON object: every access says what it expects, every refusal names the field.

Owns the record of which fields were read, so that the caller can report the rest. Used by `config.model` only.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from deepspan.errors import ConfigError


class Fields:
    """Reads fields of one JSON object; `path` prefixes their names in messages."""

    def __init__(self, raw: Mapping[str, Any], path: str = "") -> None:
        self._raw = raw
        self._path = path
        self._read: set[str] = set()

    def unread(self) -> set[str]:
        """Names of fields nobody asked for."""
        return set(self._raw) - self._read

    def optional(self, name: str) -> Any:
        """The value, or None if it is absent or null."""
        self._read.add(name)
        return self._raw.get(name)

    def required(self, name: str) -> Any:
        value = self.optional(name)
        if value is None:
            raise ConfigError(f"{self._path}{name} is missing")
        return value

    def first_of(self, names: Sequence[str]) -> Any:
        """Value of the first present field among synonyms."""
        for name in names:
            if (value := self.optional(name)) is not None:
                return value
        raise ConfigError(f"{self._path}{names[0]} is missing")

    def integer(self, name: str) -> int:
        value = self.required(name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{self._path}{name} must be an integer, found {value!r}")
        return value

    def positive(self, name: str) -> int:
        return self._at_least(name, 1)

    def natural(self, name: str) -> int:
        return self._at_least(name, 0)

    def number(self, name: str) -> float:
        value = self.required(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{self._path}{name} must be a number, found {value!r}")
        return float(value)

    def int_list(self, name: str) -> list[int]:
        value = self.required(name)
        if not isinstance(value, list) or any(isinstance(v, bool) or not isinstance(v, int) for v in value):
            raise ConfigError(f"{self._path}{name} must be a list of integers, found {value!r}")
        return value

    def choice_of(self, names: Sequence[str], choices: Sequence[str]) -> str:
        value = self.first_of(names)
        if value not in choices:
            raise ConfigError(f"{self._path}{names[0]} must be one of {', '.join(choices)}, found {value!r}")
        return value

    def equal_if_present(self, name: str, served: Any) -> None:
        value = self.optional(name)
        if value is not None and value != served:
            raise ConfigError(f"{self._path}{name} must be {served!r}, found {value!r}")

    def sub(self, name: str) -> "Fields":
        value = self.required(name)
        if not isinstance(value, dict):
            raise ConfigError(f"{self._path}{name} must be an object, found {value!r}")
        return Fields(value, path=f"{self._path}{name}.")

    def refuse_others_with_prefix(self, prefix: str, because: str) -> None:
        """Half-described parts are errors: a typo in the switch field must not turn the part off silently."""
        for name in sorted(self.unread()):
            if name.startswith(prefix) and self._raw[name] is not None:
                raise ConfigError(f"{self._path}{name} is set but {because}")

    def _at_least(self, name: str, low: int) -> int:
        value = self.integer(name)
        if value < low:
            raise ConfigError(f"{self._path}{name} must be at least {low}, found {value}")
        return value
