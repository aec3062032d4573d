"""Reading the tensors of quantised layers: checks of their values, and the modules that keep them packed.

Invariants: weights and one-byte scales are never copied on the way (the file stays mapped); a scale that is no positive
number never reaches the network. Called by `weights.load`.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from deepspan.errors import WeightsError
from deepspan.model.packed_linear import STATIC_PARAMETERS, PackedLinear, scale_name
from deepspan.ops.formats import E8M0_NAN, Format
from deepspan.ops.registry import OpTable
from deepspan.weights.checkpoint import Checkpoint
from deepspan.weights.folder import StoredTensors
from deepspan.weights.forms import E8M0, Forms
from deepspan.weights.names import Place

_KEPT_WEIGHTS = {Format.FP8: torch.float8_e4m3fn}  # all others are int8
_SCALES = ("scale", "weight_scale", "input_scale", "deq_scale")


def install_packed(
    parts: Sequence[nn.Module], ops: OpTable, stored: StoredTensors, places: Mapping[str, Place], forms: Forms
) -> None:
    """Put packed layers in the place of plain ones, on the meta device. parts: what together has every module."""
    owners = {name: module for part in parts for name, module in part.named_modules()}
    for module, form in forms.formats.items():
        if f"{module}.weight" in forms.left_out:
            continue
        parent, _, name = module.rpartition(".")
        owner = owners[parent]
        dtype = getattr(owner, name).weight.dtype
        names = ("weight", *(STATIC_PARAMETERS if form is Format.INT8_STATIC else (scale_name(form),)))
        tensors = {
            last: torch.empty(
                forms.table[f"{module}.{last}"].shape,
                dtype=_kept_dtype(last, form, stored.tensors[places[f"{module}.{last}"].key].dtype),
                device="meta",
            )
            for last in names
        }
        setattr(owner, name, PackedLinear(form, tensors, ops, dtype=dtype))


def _kept_dtype(last: str, form: Format, stored: str) -> torch.dtype:
    """stored: safetensors' name of the dtype in the file."""
    if last == "weight":
        return _KEPT_WEIGHTS.get(form, torch.int8)
    if last == "quant_bias":
        return torch.int32
    return torch.float8_e8m0fnu if stored in (E8M0, "U8") else torch.float32


class PackedReader:
    """Tensors by original name, as the network keeps them or ready to be converted."""

    def __init__(self, checkpoint: Checkpoint, places: Mapping[str, Place], forms: Forms) -> None:
        self._checkpoint, self._places, self._forms = checkpoint, places, forms

    def read(self, name: str) -> Tensor:
        """A tensor of the table. Raises WeightsError naming file and tensor if its values cannot be right."""
        module, _, last = name.rpartition(".")
        stored = self._stored(name)
        if module in self._forms.formats:
            if last == "weight":
                return stored.view(_KEPT_WEIGHTS.get(self._forms.formats[module], torch.int8))
            return self._checked(name, last, stored)
        if module in self._forms.decoded and last == "weight":
            scale = f"{module}.weight_scale"
            return stored.float() * self._checked(scale, "weight_scale", self._stored(scale)).view(-1, 1)
        return stored

    def check_left_out(self) -> None:
        """Offsets are left out because they are zero: see that they are, in layers that are loaded."""
        for name in self._forms.left_out:
            module, _, last = name.rpartition(".")
            if last != "weight_offset" or f"{module}.weight" in self._forms.left_out:
                continue
            offset = self._stored(name)
            if bool((offset != 0).any()):
                raise WeightsError(f"{name} ({self._file(name)}) holds {_worst(offset)}; expected 0 everywhere")

    def _stored(self, name: str) -> Tensor:
        place = self._places[name]
        return self._checkpoint.read(place.key, place.expert, place.part, place.num_parts)

    def _file(self, name: str) -> str:
        return self._checkpoint.tensors[self._places[name].key].file.name

    def _checked(self, name: str, last: str, stored: Tensor) -> Tensor:
        """Scales as the network keeps them; one-byte ones as bytes, since casting would change their meaning."""
        if last == "deq_scale" and stored.dtype == torch.int64:
            stored = self._from_bits(name, stored)
        if last not in _SCALES:
            if stored.is_floating_point() and not bool(stored.isfinite().all()):
                raise WeightsError(f"{name} ({self._file(name)}) holds {_worst(stored)}; expected finite numbers")
            return stored
        if stored.dtype in (torch.uint8, torch.float8_e8m0fnu):
            stored = stored.view(torch.float8_e8m0fnu)
        if not _all_positive(stored):
            bad = ~(stored.float().isfinite() & (stored.float() > 0))
            index = bad.nonzero()[0].tolist()
            value = float(stored[tuple(index)].float())
            raise WeightsError(
                f"{name} ({self._file(name)}) holds {int(bad.sum())} scales that are no positive number, the first is "
                f"{value} at {index}"
            )
        return stored

    def _from_bits(self, name: str, stored: Tensor) -> Tensor:
        """fp32 numbers whose bits a 64-bit integer holds: casting it would give wrong numbers without an error."""
        if bool(((stored < 0) | (stored >= 1 << 32)).any()):
            raise WeightsError(f"{name} ({self._file(name)}) holds {_worst(stored)}; expected the 32 bits of a number")
        return torch.where(stored < 1 << 31, stored, stored - (1 << 32)).to(torch.int32).view(torch.float32)


def _all_positive(scales: Tensor) -> bool:
    """Whether all are finite and above 0. No mask is made: thousands of them leave holes that the heap never fills."""
    if scales.dtype == torch.float8_e8m0fnu:
        return int(scales.view(torch.uint8).max()) != E8M0_NAN
    lowest, highest = torch.aminmax(scales)
    return bool(lowest > 0) and bool(highest.isfinite())


def _worst(values: Tensor) -> float | int:
    """What of some values to show: one that is not finite, otherwise the one furthest from zero."""
    flat = values.flatten()
    odd = flat[~flat.isfinite()]
    return (odd[0] if len(odd) else flat[flat.abs().argmax()]).item()
