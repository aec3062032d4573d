"""Which implementation serves which operation.

An op *means* its torch reference; a provider is a faster function with the same signature and a declared tolerance. The
table of bound callables is resolved once and handed to the model, so that model code never asks where it runs.
Used by `model` (through `OpTable`), `runtime` (resolving) and `deepspan inspect ops`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from deepspan.errors import ConfigError
from deepspan.ops import attention, compress, experts, hyper, indexer, norm, packed, rope, router, vision

OpFunction = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """An operation: its reference, and how far a provider may stray from it (relative, per dtype)."""

    name: str
    reference: OpFunction
    tolerance_fp32: float = 1e-5
    tolerance_bf16: float = 2e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """A function that serves one op.

    devices: device types served, empty for all. dtypes: activation dtypes served, empty for all.
    available: whether the machine has what it needs. capturable: may run inside a captured graph.
    batch_invariant: a row's result never depends on the other rows.
    """

    op: str
    name: str
    function: OpFunction
    devices: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    available: Callable[[], bool] = lambda: True
    capturable: bool = False
    batch_invariant: bool = False

    def serves(self, device: str, dtype: torch.dtype) -> bool:
        fits = (not self.devices or device in self.devices) and (not self.dtypes or dtype in self.dtypes)
        return fits and self.available()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTable:
    """One bound callable per op; signatures and meaning are those of the references."""

    rms_norm: OpFunction
    apply_rope: OpFunction
    hyper_pre: OpFunction
    hyper_post: OpFunction
    hyper_head: OpFunction
    compress_groups: OpFunction
    index_entries: OpFunction
    sparse_attention: OpFunction
    route: OpFunction
    clamped_swiglu: OpFunction
    routed_experts: OpFunction
    linear_fp8: OpFunction
    grouped_linear_fp8: OpFunction
    linear_int8: OpFunction
    linear_int8_static: OpFunction
    experts_fp8: OpFunction
    experts_fp4: OpFunction
    experts_int8: OpFunction
    experts_int4: OpFunction
    apply_vision_rope: OpFunction
    vision_attention: OpFunction
    unfold_tiles: OpFunction


OPS: Mapping[str, Op] = {
    function.__name__: Op(name=function.__name__, reference=function)
    for function in (
        norm.rms_norm,
        rope.apply_rope,
        hyper.hyper_pre,
        hyper.hyper_post,
        hyper.hyper_head,
        compress.compress_groups,
        indexer.index_entries,
        attention.sparse_attention,
        router.route,
        experts.clamped_swiglu,
        experts.routed_experts,
        packed.linear_fp8,
        packed.grouped_linear_fp8,
        packed.linear_int8,
        packed.linear_int8_static,
        packed.experts_fp8,
        packed.experts_fp4,
        packed.experts_int8,
        packed.experts_int4,
        vision.apply_vision_rope,
        vision.vision_attention,
        vision.unfold_tiles,
    )
}
REFERENCE = "torch"
assert set(OPS) == {field.name for field in fields(OpTable)}, "OpTable and OPS must name the same operations"


def resolve(
    device: str,
    dtype: torch.dtype,
    providers: Sequence[Provider] = (),
    overrides: Mapping[str, str] | None = None,
) -> dict[str, Provider]:
    """The provider of every op: the first of `providers` that serves device and dtype, otherwise the reference.

    overrides: op name -> provider name that must be taken. Raises ConfigError if an override names an unknown op, or a
    provider that is unknown or does not serve this device and dtype.
    """
    overrides = overrides or {}
    if unknown := sorted(set(overrides) - set(OPS)):
        raise ConfigError(f"unknown op {unknown[0]!r}; ops are {', '.join(OPS)}")
    return {name: _choose(op, device, dtype, providers, overrides.get(name)) for name, op in OPS.items()}


def _choose(op: Op, device: str, dtype: torch.dtype, providers: Sequence[Provider], wanted: str | None) -> Provider:
    reference = Provider(op=op.name, name=REFERENCE, function=op.reference)
    candidates = [*(p for p in providers if p.op == op.name), reference]
    if wanted is not None:
        candidates = [p for p in candidates if p.name == wanted]
    for provider in candidates:
        if provider.serves(device, dtype):
            return provider
    raise ConfigError(f"op {op.name}: no provider {wanted!r} for {device} and {dtype}")


def bind(chosen: Mapping[str, Provider]) -> OpTable:
    """Turn resolved providers into the table that the model calls."""
    return OpTable(**{name: provider.function for name, provider in chosen.items()})


def reference_ops() -> OpTable:
    """Every op by its torch reference: runs on any device and is differentiable."""
    return OpTable(**{name: op.reference for name, op in OPS.items()})
