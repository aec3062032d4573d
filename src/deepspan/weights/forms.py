"""In which form a checkpoint keeps each linear layer: plain numbers, or a quantised format with its companion tensors.

The form is told by the weight's dtype together with its companions, and in exports with a description by its label;
never by the size of a number. The outcome is the table of what must be there, in the shapes and dtypes of that form, so
that the loader's checks of missing, unexpected and misshapen tensors hold for every format. Called by `weights.load`.

Shapes: N outputs, K inputs of a layer.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from deepspan.config.model import ModelConfig
from deepspan.config.quantisation import FP8_METHOD
from deepspan.errors import WeightsError
from deepspan.ops.formats import FP4_GROUP, FP8_BLOCK, Format
from deepspan.weights import description as scheme
from deepspan.weights.description import Description
from deepspan.weights.folder import DESCRIPTION_FILE, StoredTensors
from deepspan.weights.names import Place
from deepspan.weights.table import Storage, Table, TensorSpec

log = logging.getLogger(__name__)

E8M0, E4M3 = "F8_E8M0", "F8_E4M3"
ONE_BYTE_INTEGERS = frozenset(("I8", "U8"))
# What may lie beside a quantised `weight`.
_COMPANIONS = (
    "scale", "weight_scale", "weight_offset", "scale_bias", "input_scale", "input_offset", "quant_bias", "deq_scale",
)  # fmt: skip
_SYMMETRIC = "weights are symmetric: their offsets are zero"
_PER_TOKEN = "activations are rounded with a scale per token"
_SHIFTED = "a correction for kernels that shift activations to unsigned numbers"
# Layers with the same inputs, which kernels join.
FUSED = (("attn.wq_a", "attn.wkv"), ("ffn.shared_experts.w1", "ffn.shared_experts.w3"))
_EXPERT = re.compile(r"(.*ffn\.)experts\.\d+\.w[123]")
# Plain linear layers of the release that an export may quantise all the same.
_ALSO_LINEAR = re.compile(r".*\.(compressor\.(wkv|wgate)|indexer\.weights_proj)")
# No op takes these as integers: they are decoded once, when they are loaded.
_DECODED_AHEAD = re.compile(r".*\.(attn\.wo_a|compressor\.(wkv|wgate))")


@dataclass(frozen=True, slots=True, kw_only=True)
class Forms:
    """table: every tensor, packed ones in their stored shape. left_out: as in the loader, companions included.

    formats: by module name, of the layers that stay packed. decoded: int8 modules that are made plain when loaded.
    """

    table: Table
    left_out: Mapping[str, str]
    formats: Mapping[str, Format]
    decoded: frozenset[str]


def canonical_scales(checkpoint: StoredTensors, places: Mapping[str, Place]) -> dict[str, Place]:
    """Block scales under one name, `X.scale`; files also say `weight_scale_inv` or (some exports) `weight_scale`."""
    result = dict(places)
    for name, place in places.items():
        module, _, last = name.rpartition(".")
        weight = places.get(f"{module}.weight")
        if weight is None or last not in ("weight_scale", "weight_scale_inv"):
            continue
        dtype, own = checkpoint.tensors[weight.key].dtype, checkpoint.tensors[place.key].dtype
        of_groups = dtype in ONE_BYTE_INTEGERS and own in (E8M0, "U8")
        if last == "weight_scale_inv" or dtype == E4M3 or of_groups:
            if f"{module}.scale" in result:
                raise WeightsError(
                    f"tensors {result[f'{module}.scale'].key} and {place.key} both are the scale of {module}"
                )
            result[f"{module}.scale"] = result.pop(name)
    return result


def find_forms(
    checkpoint: StoredTensors,
    table: Table,
    places: Mapping[str, Place],
    left_out: Mapping[str, str],
    config: ModelConfig,
    description: Description | None,
) -> Forms:
    """Raises WeightsError naming the tensor whose form is not served or contradicts its neighbours."""
    if description is not None:
        _check_coverage(description, places, config)
    finder = _Finder(checkpoint, places, description)
    found = {
        module: form
        for name, spec in table.items()
        if name in places
        and _is_linear(name, spec)
        and (form := finder.form_of(module := name.removesuffix(".weight"), spec)) is not None
    }
    if description is None:
        _check_expert_dtype(found, config.quantisation.expert_dtype)
    else:
        _check_description(description, found)
        _check_rotation(description, [name for name in table if name not in left_out])
    _check_agreement(table, places, found)
    expanded, dropped = dict(table), dict(left_out)
    for module, form in found.items():
        weight = f"{module}.weight"
        specs = _packed_specs(module, table[weight], form, finder)
        expanded |= specs
        reason = left_out.get(weight)
        dropped |= {name: reason or spec.unused for name, spec in specs.items() if reason or spec.unused}
    decoded = frozenset(
        module for module, form in found.items() if form is Format.INT8 and _DECODED_AHEAD.fullmatch(module)
    )
    for module in sorted(module for module in decoded if f"{module}.weight" not in left_out):
        log.warning("%s is quantised as int8, which no export of this model does: it is decoded when loaded", module)
        dropped[f"{module}.weight_scale"] = "folded into the weight when loaded"
    formats = {module: form for module, form in found.items() if module not in decoded}
    return Forms(table=expanded, left_out=dropped, formats=formats, decoded=decoded)


@dataclass(frozen=True, slots=True)
class _Finder:
    checkpoint: StoredTensors
    places: Mapping[str, Place]
    description: Description | None

    def where(self, name: str) -> str:
        """`name of file`, for messages."""
        return f"{name} of {self.checkpoint.tensors[self.places[name].key].file.name}"

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self.checkpoint.tensors[self.places[name].key].shape if name in self.places else None

    def form_of(self, module: str, spec: TensorSpec) -> Format | None:
        """None for plain numbers, and where the dtype fits no form: the loader then says which would."""
        weight = f"{module}.weight"
        dtype = self.checkpoint.tensors[self.places[weight].key].dtype
        companions = [name for last in _COMPANIONS if (name := f"{module}.{last}") in self.places]
        if {f"{module}.scale", f"{module}.weight_scale"} <= set(companions):
            raise WeightsError(f"{self.where(weight)} has both .scale and .weight_scale; expected one of them")
        label = self.description.labels.get(weight, scheme.FLOAT) if self.description is not None else scheme.FLOAT
        if label != scheme.FLOAT:
            return self._labelled(module, spec, label)
        if dtype == E4M3 and spec.storage in (Storage.FP8, Storage.FP4):
            return Format.FP8
        if dtype in ONE_BYTE_INTEGERS:
            return self._one_byte(module, spec, dtype)
        if companions and dtype != E4M3:
            raise WeightsError(
                f"{self.where(weight)} is stored as {dtype} and has {companions[0]}, which belongs to quantised weights"
            )
        return None

    def _labelled(self, module: str, spec: TensorSpec, label: str) -> Format:
        is_expert, where = _EXPERT.fullmatch(module) is not None, self.where(f"{module}.weight")
        if label == scheme.W4A8_DYNAMIC:
            if not is_expert or spec.shape[0] % 2:
                raise WeightsError(f"{where} is {label}, served for routed experts with an even number of rows only")
            return Format.INT4
        if label != scheme.W8A8_STATIC:
            return Format.INT8
        if is_expert or _DECODED_AHEAD.fullmatch(module):
            raise WeightsError(f"{where} is {label} (static); expected {scheme.W8A8_DYNAMIC} or {scheme.FLOAT} there")
        return Format.INT8_STATIC

    def _one_byte(self, module: str, spec: TensorSpec, dtype: str) -> Format | None:
        where = self.where(f"{module}.weight")
        if self.description is not None:
            raise WeightsError(f"{where} is stored as {dtype}, {DESCRIPTION_FILE} says {scheme.FLOAT}")
        if f"{module}.weight_scale" in self.places:
            raise WeightsError(
                f"{where} is stored as {dtype} with a weight_scale, but there is no {DESCRIPTION_FILE} that says how "
                "activations are rounded"
            )
        if spec.storage is not Storage.FP4:
            return None
        if spec.shape[1] % FP4_GROUP:
            raise WeightsError(f"{where} is stored as {dtype}; FP4 needs a multiple of {FP4_GROUP} columns, it has "
                               f"{spec.shape[1]}")  # fmt: skip
        return Format.FP4


def _is_linear(name: str, spec: TensorSpec) -> bool:
    module = name.removesuffix(".weight")
    return module != name and (spec.storage in (Storage.FP8, Storage.FP4) or _ALSO_LINEAR.fullmatch(module) is not None)


def _packed_specs(module: str, spec: TensorSpec, form: Format, finder: _Finder) -> Table:
    """The weight and its companions as they must be stored."""
    rows, columns = spec.shape
    weight = f"{module}.weight"

    def companion(last: str, shape: tuple[int, ...], *dtypes: str, unused: str = "") -> Table:
        if unused and finder.shape(f"{module}.{last}") is None:
            return {}  # what nobody reads need not be there
        spec = TensorSpec(shape=shape, storage=Storage.FP32, dtypes=frozenset(dtypes), unused=unused)
        return {f"{module}.{last}": spec}

    def by_row(last: str) -> tuple[int, ...]:
        return (rows,) if finder.shape(f"{module}.{last}") == (rows,) else (rows, 1)

    if form is Format.FP8:
        blocks = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
        # The release has FP8 experts with fp32 scales only; other scales are a sign of a mixed-up conversion.
        scales = ("F32",) if _EXPERT.fullmatch(module) else (E8M0, "F32")
        return {weight: replace(spec, dtypes=frozenset((E4M3,)))} | companion("scale", blocks, *scales)
    if form is Format.FP4:
        packed = replace(spec, shape=(rows, columns // 2), dtypes=ONE_BYTE_INTEGERS)
        return {weight: packed} | companion("scale", (rows, columns // FP4_GROUP), E8M0, "U8")
    specs = {weight: replace(spec, dtypes=frozenset(("I8",)))}
    static = form is Format.INT8_STATIC
    specs |= companion("weight_offset", by_row("weight_offset"), "F32", unused=_SYMMETRIC)
    for last, shape, dtypes in (
        ("input_scale", (1,), ("F32",)),
        ("input_offset", (1,), ("F32",)),
        ("quant_bias", (rows,), ("I32",)),
        ("deq_scale", (rows,), ("F32", "I64")),
    ):
        specs |= companion(last, shape, *dtypes, unused="" if static else _PER_TOKEN)
    specs |= companion("weight_scale", by_row("weight_scale"), "F32", unused="deq_scale holds it" if static else "")
    if form is Format.INT4:
        specs[weight] = replace(specs[weight], shape=(rows // 2, columns))
        chunks = finder.shape(f"{module}.scale_bias")
        width = 16 if chunks == (rows, 16) and module.endswith(".w2") else 1
        specs |= companion("scale_bias", (rows, width), "F32", unused=_SHIFTED)
    return specs


# --- what must agree


def _check_agreement(table: Table, places: Mapping[str, Place], found: Mapping[str, Format]) -> None:
    """Layers that are computed together have one form: all experts of a layer, and what kernels fuse."""
    first_of: dict[str, str] = {}
    pairs: list[tuple[str, str]] = []
    for name in table:
        module = name.removesuffix(".weight")
        if match := _EXPERT.fullmatch(module):
            pairs.append((first_of.setdefault(match[1], module), module))
        pairs += [
            (module, module.removesuffix(first) + second) for first, second in FUSED if module.endswith(f".{first}")
        ]
    for first, second in pairs:
        is_stored = f"{first}.weight" in places and f"{second}.weight" in places  # otherwise one is named missing
        if is_stored and found.get(first) is not found.get(second):
            raise WeightsError(
                f"{first} is {_said(found.get(first))} and {second} is {_said(found.get(second))}: layers that are "
                "computed together must have one format"
            )


def _check_expert_dtype(found: Mapping[str, Format], expert_dtype: str | None) -> None:
    for module, form in found.items():
        if expert_dtype is not None and _EXPERT.fullmatch(module) and form.value != expert_dtype:
            raise WeightsError(f"{module} is {_said(form)}, expert_dtype in config.json says {expert_dtype}")


def _check_coverage(description: Description, places: Mapping[str, Place], config: ModelConfig) -> None:
    """Every stored tensor is described and the other way round."""
    labels = description.labels
    if config.quantisation.method == FP8_METHOD:
        raise WeightsError(
            f"config.json says quantization_config.quant_method {FP8_METHOD}, but there is a {DESCRIPTION_FILE}: one "
            "of them belongs to another checkpoint"
        )
    if absent := sorted(labels.keys() - places.keys()):
        raise WeightsError(f"{DESCRIPTION_FILE} describes {absent[0]} ({len(absent)} in all), which no file holds")
    if undescribed := sorted(places.keys() - labels.keys()):
        raise WeightsError(f"{undescribed[0]} ({len(undescribed)} in all) is not described by {DESCRIPTION_FILE}")


def _check_description(description: Description, found: Mapping[str, Format]) -> None:
    """Schemes stand only where they mean something, and a weight and its companions have the same."""
    labels = description.labels
    for name, label in labels.items():
        module, _, last = name.rpartition(".")
        if last in _COMPANIONS and module in found:
            weight = f"{module}.weight"
            if label != labels[weight]:
                raise WeightsError(f"{DESCRIPTION_FILE} says {labels[weight]} of {weight} and {label} of {name}")
        elif label != scheme.FLOAT and (last != "weight" or module not in found):
            raise WeightsError(f"{DESCRIPTION_FILE} says {label} of {name}; expected {scheme.FLOAT} there")


def _check_rotation(description: Description, loaded: Sequence[str]) -> None:
    """Text alone does not notice: norms, and with them the parallel streams, do not change under a rotation."""
    if not description.is_rotated:
        return
    for kind, first in (("vision tensors", "vision."), ("draft stages", "mtp.")):
        if any(name.startswith(first) for name in loaded):
            raise WeightsError(
                f"{DESCRIPTION_FILE} declares a rotation (optional.quarot); whether the {kind} are rotated too is not "
                "said anywhere, so they cannot be served"
            )
    log.info("the residual stream of the checkpoint is rotated, which changes nothing for text")


def _said(form: Format | None) -> str:
    return form.value if form is not None else "plain"
