"""Typed reading of a JSON object: every access says what it expects, every refusal names the field.

Owns the record of which fields were read, so that the caller can report the rest. Used by `config.model` only.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from deepspan.errors import ConfigError


class Fields:
    """Reads fields of one JSON object; `path` prefixes their names in messages."""

    def __init__(self, raw: Mapping[str, Any], path: str = "") -> None:
        self._raw = raw
        self._path = path
        self._read: set[str] = set()
        self._subs: list[Fields] = []

    def unread(self) -> set[str]:
        """Full names of fields nobody asked for, those of objects inside included."""
        own = {self._path + name for name in set(self._raw) - self._read}
        return own.union(*(sub.unread() for sub in self._subs))

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
        if not abs(value) <= sys.float_info.max:  # written so that NaN, which JSON readers accept, is refused too
            raise ConfigError(f"{self._path}{name} must be a finite number")
        return float(value)

    def above(self, name: str, low: float) -> float:
        value = self.number(name)
        if value <= low:
            raise ConfigError(f"{self._path}{name} must be above {low:g}, found {value:g}")
        return value

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
        self._subs.append(Fields(value, path=f"{self._path}{name}."))
        return self._subs[-1]

    def refuse_others_with_prefix(self, prefix: str, because: str) -> None:
        """Half-described parts are errors: a typo in the switch field must not turn the part off silently."""
        for name in sorted(set(self._raw) - self._read):
            if name.startswith(prefix) and self._raw[name] is not None:
                raise ConfigError(f"{self._path}{name} is set but {because}")

    def skip_with_prefix(self, prefix: str) -> None:
        """Count the fields of a part that is switched off as read."""
        self._read |= {name for name in self._raw if name.startswith(prefix)}

    def _at_least(self, name: str, low: int) -> int:
        value = self.integer(name)
        if value < low:
            raise ConfigError(f"{self._path}{name} must be at least {low}, found {value}")
        return value
