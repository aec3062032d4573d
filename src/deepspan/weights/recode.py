"""What each piece of a checkpoint becomes in another format: which tensors, what a description calls them, and how.

What is in the format already is kept byte by byte; a checkpoint converted to its own format comes out as it was. All
else is decoded in fp32 and encoded anew. Invariant: the headers of everything written are known before any data is
read. Called by `weights.plan`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from deepspan.errors import WeightsError
from deepspan.ops.formats import FP8_BLOCK, Format
from deepspan.weights import description as scheme
from deepspan.weights.quantise import FLOAT_OF_EXPORTS, Coding, Recipe, encode
from deepspan.weights.source import Piece, Source
from deepspan.weights.table import Storage
from deepspan.weights.writer import TensorHeader

_LABELS = {
    Format.INT8: scheme.W8A8_DYNAMIC,
    Format.INT4: scheme.W4A8_DYNAMIC,
    Format.INT8_STATIC: scheme.W8A8_STATIC,
}
_LINEAR = (Storage.FP8, Storage.FP4)
_WIDE = ("F32", "F16")  # what a plain checkpoint may hold where the release has bf16


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What is computed together and lies in one file.

    labels: of a description, by name. make: computes what `headers` promise. is_kept: byte by byte.
    """

    headers: Mapping[str, TensorHeader]
    labels: Mapping[str, str]
    make: Callable[[], Mapping[str, Tensor]]
    is_kept: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(header.num_bytes for header in self.headers.values())


def recode(source: Source, recipe: Recipe) -> list[Part]:
    """One part per piece. Raises WeightsError naming the tensor whose shape the format cannot hold."""
    if not is_own_export(source, recipe):
        return [_part(source, piece, recipe) for piece in source.pieces]
    static = {name for name in static_modules(source, recipe) if name in recipe.inputs}
    return [
        _part(source, piece, recipe) if piece.module in static else kept(source, piece) for piece in source.pieces
    ]  # fmt: skip


def is_own_export(source: Source, recipe: Recipe) -> bool:
    """Exports differ in which layers they leave plain; what is one already stays what it is."""
    return source.is_described and recipe.is_described and source.expert_form is recipe.experts


def static_modules(source: Source, recipe: Recipe) -> list[str]:
    """Layers that become int8, or are, and could have one scale for all inputs."""
    is_own = is_own_export(source, recipe)
    return [
        piece.module
        for piece in source.pieces
        if piece.spec.storage is Storage.FP8
        and not piece.module.endswith(FLOAT_OF_EXPORTS)
        and (piece.form in (Format.INT8, Format.INT8_STATIC) if is_own else recipe.dense is Format.INT8)
    ]


def kept(source: Source, piece: Piece) -> Part:
    """A piece as it is stored."""
    labels = {name: source.label(name) for name in piece.headers}
    return Part(headers=piece.headers, labels=labels, make=partial(source.stored, piece), is_kept=True)


def _part(source: Source, piece: Piece, recipe: Recipe) -> Part:
    coding = None
    if piece.spec.storage in _LINEAR:
        coding = recipe.coding(piece.module, is_expert=piece.spec.storage is Storage.FP4)
    if coding is None:
        return _plain(source, piece)
    if piece.form is coding.form and piece.form is not Format.INT8_STATIC:
        if piece.form is not Format.FP8 or _scale_dtype(piece) == _wanted_scale(coding):
            return kept(source, piece)
        if _wanted_scale(coding) == "F32":
            return _with_wide_scale(source, piece)
    return _encoded(source, piece, coding)


def _plain(source: Source, piece: Piece) -> Part:
    """Plain numbers: bf16 where the release has bf16 or less, all else as stored."""
    dtype = piece.headers[piece.name].dtype
    is_narrow = piece.spec.storage in (*_LINEAR, Storage.BF16)
    if piece.form is None and not (is_narrow and dtype in _WIDE):
        return kept(source, piece)
    header = TensorHeader(dtype="BF16", shape=piece.spec.shape)
    return Part(
        headers={piece.name: header},
        labels={piece.name: scheme.FLOAT},
        make=lambda: {piece.name: source.plain(piece).bfloat16()},
    )


def _with_wide_scale(source: Source, piece: Piece) -> Part:
    """FP8 with powers of two as fp32 scales: the same numbers."""
    scale = f"{piece.module}.scale"
    headers = dict(piece.headers) | {scale: TensorHeader(dtype="F32", shape=piece.headers[scale].shape)}

    def make() -> dict[str, Tensor]:
        tensors = source.stored(piece)
        return tensors | {scale: tensors[scale].view(torch.float8_e8m0fnu).float()}

    return Part(headers=headers, labels=dict.fromkeys(headers, scheme.FLOAT), make=make)


def _encoded(source: Source, piece: Piece, coding: Coding) -> Part:
    try:
        shapes = _encoded_headers(piece.spec.shape, coding)
    except WeightsError as error:
        raise WeightsError(f"{piece.name} has {error}") from None
    headers = {f"{piece.module}.{last}": header for last, header in shapes.items()}

    def make() -> dict[str, Tensor]:
        encoded = encode(source.plain(piece), coding)
        return {f"{piece.module}.{last}": tensor for last, tensor in encoded.items()}

    return Part(headers=headers, labels=dict.fromkeys(headers, _LABELS.get(coding.form, scheme.FLOAT)), make=make)


@cache
def _encoded_headers(shape: tuple[int, ...], coding: Coding) -> dict[str, TensorHeader]:
    encoded = encode(torch.empty(shape, device="meta"), coding)
    return {last: TensorHeader.of(tensor) for last, tensor in encoded.items()}


def _scale_dtype(piece: Piece) -> str:
    dtype = piece.headers[f"{piece.module}.scale"].dtype
    return "F8_E8M0" if dtype == "U8" else dtype


def _wanted_scale(coding: Coding) -> str:
    return "F32" if coding.block_scale == torch.float32 else "F8_E8M0"


# --- what stands beside the tensors


def config_of(source: Source, recipe: Recipe) -> dict[str, Any]:
    """Contents of the new `config.json`: what it says of formats is replaced, all else stays."""
    raw = dict(source.raw)
    if is_own_export(source, recipe):
        return raw
    for name in ("torch_dtype", "dtype"):
        if name in raw:
            raw[name] = "bfloat16"
    if recipe.is_described or recipe.experts is None:
        raw.pop("quantization_config", None)
        raw.pop("expert_dtype", None)
        return raw
    scale_fmt = {} if recipe.block_scale == torch.float32 else {"scale_fmt": "ue8m0"}
    return raw | {
        "expert_dtype": recipe.experts.value,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
            **scale_fmt,
        },
    }


def description_of(source: Source, labels: Mapping[str, str], *, is_own: bool) -> dict[str, Any]:
    """Contents of the description: what an export says of itself as a whole stays, a rotation above all."""
    metadata = {
        "model_quant_type": scheme.W8A8_DYNAMIC,
        "version": "1.0.0",
        "group_size": 0,
        "metadata": {},
        "optional": {},
    }
    if is_own:
        metadata |= source.metadata
    elif "optional" in source.metadata:
        metadata["optional"] = source.metadata["optional"]
    return metadata | dict(labels)
