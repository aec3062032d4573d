"""Sizes as people write and read them; no torch. Used by verbs that take or show memory."""

import re

from deepspan.errors import ConfigError

_UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SHOWN = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def parse_bytes(text: str, what: str = "memory") -> int:
    """`8GiB`, `500 MB` or plain bytes. what: its name in messages. Raises ConfigError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if found is None or found[2].upper() not in _UNITS:
        raise ConfigError(f"{what} must be a number with one of {', '.join(u for u in _UNITS if u)}, found {text!r}")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def bytes_text(num_bytes: int) -> str:
    """`148.65 GiB`, in the largest unit of which there is one."""
    for unit, size in _SHOWN:
        if num_bytes >= size:
            return f"{num_bytes / size:,.2f} {unit}"
    return f"{num_bytes:,} B"
