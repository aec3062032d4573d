"""What a checkpoint holds, counted by part of the network: from headers, or from a configuration alone.

From a configuration it is what the release of that configuration stores, to the byte, so that sizes are known before
anything is downloaded. Invariant: every tensor is in exactly one part. Data is never read. Used by `weights.examine`,
`runtime.footprint` and `cli`.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deepspan.config.model import ModelConfig, load_model_config
from deepspan.config.quantisation import ASCEND_METHOD, FP8_METHOD
from deepspan.errors import ConfigError
from deepspan.ops.formats import FP4_GROUP, FP8_BLOCK, Format
from deepspan.weights.folder import DESCRIPTION_FILE, SUFFIX, Headers, StoredTensors
from deepspan.weights.forms import E4M3, E8M0
from deepspan.weights.header import StoredTensor
from deepspan.weights.table import DraftKind, Storage, Table, TensorSpec, backbone_tensors, draft_tensors

EXPERTS, DRAFT_EXPERTS, UNKNOWN = "routed experts", "draft experts", "unknown"
# Which part a tensor belongs to by its original name: the first pattern that fits, in the order of the network.
_PARTS = (
    ("embedding", r"embed\..+"),
    ("indexer", r"layers\.\d+\.attn\.indexer\..+"),
    ("compressors", r"layers\.\d+\.attn\.compressor\..+"),
    ("attention", r"layers\.\d+\.attn\..+"),
    ("routers", r"layers\.\d+\.ffn\.gate\..+"),
    (EXPERTS, r"layers\.\d+\.ffn\.experts\..+"),
    ("shared experts", r"layers\.\d+\.ffn\.shared_experts\..+"),
    ("hyper-connections", r"(layers\.\d+\.hc_(attn|ffn)|hc_head)_.+"),
    ("norms", r"(layers\.\d+\.(attn|ffn)_)?norm\..+"),
    ("head", r"head\..+"),
    ("vision tower", r"vision\..+"),
    ("aligner", r"aligner\..+"),
    ("image vectors", r"image_.+"),
    (DRAFT_EXPERTS, r"mtp\.\d+\.ffn\.experts\..+"),
    ("draft stages", r"mtp\..+"),
)
_PATTERNS = tuple((part, re.compile(pattern)) for part, pattern in _PARTS)
PARTS = (*(part for part, _ in _PARTS), UNKNOWN)
_NOT_FOR_TEXT = frozenset(("vision tower", "aligner", "image vectors", DRAFT_EXPERTS, "draft stages", UNKNOWN))
_PLAIN = {Storage.FP32: "F32", Storage.INT64: "I64"}  # all else is BF16 where it is not quantised


@dataclass(slots=True, kw_only=True)
class PartCount:
    """num_tensors: stored ones, scales included. num_parameters: numbers of the network, whatever they are packed into.

    Scales and tables of expert ids are no parameters. bytes_by_dtype: by safetensors' name of the dtype.
    """

    num_tensors: int = 0
    num_parameters: int = 0
    bytes_by_dtype: Counter[str] = field(default_factory=Counter)

    @property
    def num_bytes(self) -> int:
        return self.bytes_by_dtype.total()


def part_of(name: str) -> str:
    """Part of the network that a tensor belongs to, by its original name; `unknown` if no part has such a name."""
    return next((part for part, pattern in _PATTERNS if pattern.fullmatch(name)), UNKNOWN)


def count_parts(
    tensors: Mapping[str, StoredTensor], names: Mapping[str, Iterable[str]], table: Table
) -> dict[str, PartCount]:
    """Counts by part, in the order of `PARTS`, of those that are there.

    tensors: by stored name. names: original names under each stored one (several for stacked experts). table: plain.
    """
    found: dict[str, PartCount] = {}
    for key, stored in tensors.items():
        originals = list(names.get(key, ()))
        count = found.setdefault(part_of(originals[0]) if originals else UNKNOWN, PartCount())
        count.num_tensors += 1
        count.bytes_by_dtype[stored.dtype] += stored.num_bytes
        count.num_parameters += sum(_num_parameters(table[name]) for name in originals if name in table)
    return {part: found[part] for part in PARTS if part in found}


def active_parameters(parts: Mapping[str, PartCount], config: ModelConfig) -> int:
    """Parameters that compute one token of text: all of the text network, and of routed experts the chosen ones."""
    total = 0
    for part, count in parts.items():
        if part == EXPERTS:
            total += count.num_parameters * config.num_experts_per_tok // config.n_routed_experts
        elif part not in _NOT_FOR_TEXT:
            total += count.num_parameters
    return total


def _num_parameters(spec: TensorSpec) -> int:
    return 0 if spec.storage is Storage.INT64 else math.prod(spec.shape)


# --- what is expected


def holds_weights(model: Path) -> bool:
    """Whether there is anything of a checkpoint's weights to look at, complete or not."""
    return model.is_dir() and (any(model.glob(f"*{SUFFIX}*")) or (model / DESCRIPTION_FILE).exists())


def stored_or_expected(model: Path) -> tuple[ModelConfig, StoredTensors]:
    """The configuration of a checkpoint folder (or of a `config.json`), and headers of its tensors.

    Where there are no weights, headers are those that the configuration lets expect. Raises ConfigError, WeightsError.
    """
    config = load_model_config(model)
    if not holds_weights(model):
        return config, expected_headers(config, model)
    headers = Headers(model)
    headers.require()
    return config, headers


def expected_headers(config: ModelConfig, source: Path) -> StoredTensors:
    """Headers of the release of this configuration, under original names.

    source: what they are said to be from. Draft stages are as many as `compress_ratios` has entries for.
    Raises ConfigError if the configuration does not say how the release is stored.
    """
    if config.quantisation.method == ASCEND_METHOD:
        raise ConfigError(
            f"config.json says quantization_config.quant_method {ASCEND_METHOD}: what such an export holds is told by "
            f"its files and its {DESCRIPTION_FILE} alone"
        )
    is_packed, experts = config.quantisation.method == FP8_METHOD, config.quantisation.expert_dtype
    formats = {
        Storage.FP8: Format.FP8 if is_packed else None,
        Storage.FP4: Format(experts) if experts else Format.FP8 if is_packed else None,
    }
    # The release has one-byte scales beside FP4 experts, and fp32 ones throughout where experts are FP8.
    scale = "F32" if formats[Storage.FP4] is Format.FP8 else E8M0
    tensors = {
        stored_name: StoredTensor(file=source, shape=shape, dtype=dtype)
        for name, spec in expected_table(config).items()
        for stored_name, shape, dtype in _stored(name, spec, formats.get(spec.storage), scale)
    }
    return StoredTensors(source, tensors)


def expected_table(config: ModelConfig) -> Table:
    """Network and draft stages of the release of this configuration."""
    kind = DraftKind.DSPARK if config.draft is not None else DraftKind.MTP
    return backbone_tensors(config) | draft_tensors(config, config.num_draft_ratios, kind)


def _stored(name: str, spec: TensorSpec, form: Format | None, scale: str) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(name, shape, dtype) of a tensor as it is stored, and of its scales."""
    if form is None:
        yield name, spec.shape, _PLAIN.get(spec.storage, "BF16")
        return
    rows, columns = spec.shape
    scales = f"{name.removesuffix('weight')}scale"
    if form is Format.FP8:
        yield name, spec.shape, E4M3
        yield scales, (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)), scale
        return
    if columns % FP4_GROUP:
        raise ConfigError(f"expert_dtype fp4 needs a multiple of {FP4_GROUP} columns, {name} has {columns}")
    yield name, (rows, columns // 2), "I8"
    yield scales, (rows, columns // FP4_GROUP), E8M0
