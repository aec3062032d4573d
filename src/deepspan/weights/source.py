"""A checkpoint as a conversion reads it: piece by piece, each with all its tensors, as stored or decoded.

A piece is a linear layer with its companions, or one tensor. Original names whatever the files call them; draft stages
and tensors that the network never reads are pieces too, since a conversion must not lose them. Invariants: headers
fit the configuration before any data is read; numbers that are not finite are refused by name; no more than one piece
and a limited amount of mapped file are held. Called by `weights.plan`.

Shapes: N outputs, K inputs of a layer.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspan.config.model import load_model_config
from deepspan.errors import WeightsError
from deepspan.ops.formats import Format, Packed, decode_fp4, decode_fp8, unpack_int4
from deepspan.weights.checkpoint import Checkpoint
from deepspan.weights.description import FLOAT, read_description, read_metadata
from deepspan.weights.load import fit_headers, shape_at
from deepspan.weights.packed import PackedReader
from deepspan.weights.placing import draft_kind, expected, naming_of, num_stages, place_all
from deepspan.weights.table import DraftKind, TensorSpec
from deepspan.weights.writer import TensorHeader

MAX_MAPPED = 256 << 20  # bytes read from mapped files before they are mapped anew
_CHECKED_AT_ONCE = 1 << 24
_STATIC = ("input_scale", "input_offset", "quant_bias", "deq_scale")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A linear layer or a single tensor.

    name: of its weight, or of the tensor. spec: of the plain one. form: None where it is stored plain.
    headers: of everything stored, by original name, `name` first.
    """

    name: str
    spec: TensorSpec
    form: Format | None
    headers: Mapping[str, TensorHeader]

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")

    @property
    def is_expert(self) -> bool:
        return ".experts." in self.name


class Source:
    """A checkpoint folder of any format that is served.

    config, raw: its configuration, read and as it stands in the file. is_described: whether it is an export with a
    description; metadata: what that says of the whole. draft_kind: None without draft stages. pieces: in a fixed order.
    """

    def __init__(self, folder: Path) -> None:
        """Reads headers only. Raises ConfigError or WeightsError naming the field, file or tensors at fault."""
        self.folder, self.config = folder, load_model_config(folder)
        self.raw: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.checkpoint = Checkpoint(folder)
        keys = list(self.checkpoint)
        description = read_description(folder, self.config.num_hidden_layers)
        self.is_described = description is not None
        self.metadata = read_metadata(folder) if self.is_described else {}
        self._labels = description.labels if description is not None else {}
        names = place_all(keys, self.config, naming_of(keys, described=self.is_described))
        self.num_stages = num_stages(names)
        self.draft_kind: DraftKind | None = draft_kind(names) if self.num_stages else None
        self._fit = fit_headers(self.checkpoint, self.config, self.draft_kind)
        self._plain, _ = expected(self.config, self._fit.places, self.draft_kind)
        self._reader = PackedReader(self.checkpoint, self._fit.places, self._fit.forms)
        self.pieces = self._find_pieces()
        self._num_mapped = 0

    @property
    def expert_form(self) -> Format | None:
        """Of the routed experts of the network."""
        return next(piece.form for piece in self.pieces if piece.is_expert and piece.name.startswith("layers."))

    def label(self, name: str) -> str:
        """What a description calls a tensor."""
        return self._labels.get(name, FLOAT)

    def stored(self, piece: Piece) -> dict[str, Tensor]:
        """Everything of a piece as it is stored. Raises WeightsError if a number in it cannot be right."""
        self._check(piece)
        return {name: self._read(name) for name in piece.headers}

    def plain(self, piece: Piece) -> Tensor:
        """The weight [N, K] decoded in fp32, or the tensor in its own dtype. Raises WeightsError as `stored` does."""
        self._check(piece)
        if piece.form is None:
            return self._read(piece.name)
        if piece.form is Format.INT8_STATIC:
            return self._of_static(piece)
        scale = "scale" if piece.form in (Format.FP8, Format.FP4) else "weight_scale"
        if piece.module in self._fit.forms.decoded:
            return self._reader.read(piece.name)
        packed = Packed(self._reader.read(piece.name), self._reader.read(f"{piece.module}.{scale}"))
        if piece.form is Format.FP8:
            return decode_fp8(packed)
        if piece.form is Format.FP4:
            return decode_fp4(packed)
        integers = packed.values if piece.form is Format.INT8 else unpack_int4(packed.values)
        return integers.float() * packed.scale.view(-1, 1)

    def check_offsets(self) -> None:
        """Raises WeightsError if weights are not symmetric."""
        self._reader.check_left_out()

    # --- inside

    def _find_pieces(self) -> list[Piece]:
        forms, companions = self._fit.forms, dict[str, list[str]]()
        for name in forms.table.keys() - self._plain.keys():
            companions.setdefault(name.rpartition(".")[0], []).append(name)
        pieces = []
        for name, spec in self._plain.items():
            module = name.removesuffix(".weight") if name.endswith(".weight") else ""
            form = Format.INT8 if module in forms.decoded else forms.formats.get(module)
            names = [name, *sorted(companions.get(module, []))]
            headers = {part: self._header(part) for part in names}
            pieces.append(Piece(name=name, spec=spec, form=form, headers=headers))
        return pieces

    def _header(self, name: str) -> TensorHeader:
        place = self._fit.places[name]
        stored = self.checkpoint.tensors[place.key]
        return TensorHeader(dtype=stored.dtype, shape=shape_at(stored, place, self.config.n_routed_experts))

    def _read(self, name: str) -> Tensor:
        header, place = self._header(name), self._fit.places[name]
        self._num_mapped += header.num_bytes
        if self._num_mapped > MAX_MAPPED:
            self._num_mapped = header.num_bytes
            self.checkpoint.forget()
        return self.checkpoint.read(place.key, place.expert, place.part, place.num_parts)

    def _check(self, piece: Piece) -> None:
        """Scales are looked at by the reader that serves them too; numbers that are used must be finite."""
        for name in piece.headers:
            if name != piece.name or piece.module in self._fit.forms.decoded:
                self._reader.read(name)
        values = self._read(piece.name)
        if piece.spec.unused or not values.is_floating_point() or (bad := _first_not_finite(values)) is None:
            return
        file = self.checkpoint.tensors[self._fit.places[piece.name].key].file.name
        value = float(values[tuple(bad)].float())
        raise WeightsError(f"{piece.name} ({file}) holds {value} at {bad}; expected finite numbers")

    def _of_static(self, piece: Piece) -> Tensor:
        """The weight of a static int8 layer, whose two scales are stored as one."""
        parts = {last: self._reader.read(f"{piece.module}.{last}") for last in _STATIC}
        integers = self._reader.read(piece.name)
        expected = -parts["input_offset"].double() * integers.sum(dim=1)
        off = (parts["quant_bias"] - expected).abs() > 1 + expected.abs() * 2**-22  # others compute it in fp32
        if bool(off.any()):
            raise WeightsError(f"{piece.module}.quant_bias holds a bias ({int(off.sum())} rows); expected none")
        return integers.float() * (parts["deq_scale"] / parts["input_scale"]).view(-1, 1)


def _first_not_finite(values: Tensor) -> list[int] | None:
    """Index of a number, or None. A run of numbers at a time: what is in between takes memory too."""
    flat, done = values.reshape(-1), 0
    for run in flat.split(_CHECKED_AT_ONCE):
        is_e4m3 = run.dtype == torch.float8_e4m3fn  # which has NaN and no infinities
        finite = (run.view(torch.uint8) & 0x7F) != 0x7F if is_e4m3 else run.isfinite()
        if not bool(finite.all()):
            at = done + int((~finite).nonzero()[0])
            return [int(index) for index in torch.unravel_index(torch.tensor(at), values.shape)]
        done += len(run)
    return None
