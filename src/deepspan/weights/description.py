"""The description that comes with a ModelSlim ("ascend") export: which scheme every stored tensor has.

Read strictly: an unknown label, a KV scheme or an online rotation would change the arithmetic, so each is refused by
name.
Names are canonical (`names.canonical_names`). Called by `weights.load`.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspan.errors import WeightsError
from deepspan.weights.checkpoint import DESCRIPTION_FILE
from deepspan.weights.names import canonical_names

FLOAT = "FLOAT"
W8A8_DYNAMIC, W8A8_MIX, W8A8_STATIC, W4A8_DYNAMIC = "W8A8_DYNAMIC", "W8A8_MIX", "W8A8", "W4A8_DYNAMIC"
LABELS = frozenset((FLOAT, W8A8_DYNAMIC, W8A8_MIX, W8A8_STATIC, W4A8_DYNAMIC))
_METADATA = frozenset(("version", "model_quant_type", "group_size", "metadata", "optional"))
_CACHE_SCHEMES = ("kv_cache_type", "kv_quant_type", "fa_quant_type", "indexer_quant_type")
# Tensors whose presence means arithmetic that is not served, and what they mean.
_FOREIGN = (
    (re.compile(r".*\.(k_proj|v_proj)\.kv_cache_(scale|offset)"), "a quantised KV cache"),
    (re.compile(r".*\.fa_[qkv]\.(scale|offset)"), "quantised attention"),
    (re.compile(r".*\.indexer\.[qk]_rot\b.*"), "a quantised indexer"),
    (re.compile(r".*(heads_rotation|kronecker_rotation).*"), "an online rotation"),
    (re.compile(r".*\.div\.mul_scale"), "smoothing at run time"),
    (re.compile(r".*\.weight_(scale|offset)_second"), "weights with two levels of scales"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """labels: canonical tensor name -> scheme. is_rotated: the residual stream was rotated offline."""

    labels: Mapping[str, str]
    is_rotated: bool


def read_description(folder: Path, num_layers: int) -> Description | None:
    """None if the folder has none. Raises WeightsError naming the key that is not served."""
    file = folder / DESCRIPTION_FILE
    if not file.exists():
        return None
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(raw, dict):
        raise WeightsError(f"{file} holds {type(raw).__name__}, expected a JSON object")
    _refuse_schemes(raw)
    labels = _labels(raw, num_layers)
    if not labels:
        raise WeightsError(f"{DESCRIPTION_FILE} describes no tensor")
    group_size = raw.get("group_size") or 0
    if group_size and W4A8_DYNAMIC in labels.values():
        raise WeightsError(f"{DESCRIPTION_FILE}: group_size must be 0 with {W4A8_DYNAMIC}, found {group_size!r}")
    return Description(labels=labels, is_rotated="quarot" in (raw.get("optional") or {}))


def read_metadata(folder: Path) -> dict[str, Any]:
    """What the description of a folder, known to be right, says of the export as a whole."""
    raw = json.loads((folder / DESCRIPTION_FILE).read_text(encoding="utf-8"))
    return {key: value for key, value in raw.items() if key in _METADATA}


def _refuse_schemes(raw: Mapping[str, Any]) -> None:
    for key in _CACHE_SCHEMES:
        if raw.get(key):
            raise WeightsError(f"{DESCRIPTION_FILE}: {key} {raw[key]!r} is not served; expected plain caches")
    for key in ("metadata", "optional"):
        if not isinstance(raw.get(key) or {}, dict):
            raise WeightsError(f"{DESCRIPTION_FILE}: {key} must be an object, found {raw[key]!r}")
    if (raw.get("metadata") or {}).get("quarot"):
        raise WeightsError(f"{DESCRIPTION_FILE}: metadata.quarot is a rotation at run time, which is not served")


def _labels(raw: Mapping[str, Any], num_layers: int) -> dict[str, str]:
    labels: dict[str, str] = {}
    for key, label in raw.items():
        if key in _METADATA or key in _CACHE_SCHEMES or not isinstance(label, str):
            continue
        for pattern, meaning in _FOREIGN:
            if pattern.fullmatch(key):
                raise WeightsError(f"{DESCRIPTION_FILE}: {key} means {meaning}, which is not served")
        if label not in LABELS:
            raise WeightsError(f"{DESCRIPTION_FILE}: {key} is {label!r}; served are {', '.join(sorted(LABELS))}")
        for name in canonical_names(key, num_layers):
            if labels.setdefault(name, label) != label:
                raise WeightsError(f"{DESCRIPTION_FILE} says both {labels[name]} and {label} of {name}")
    return labels
