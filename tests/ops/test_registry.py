"""Which provider serves an op: order, device and dtype, availability, overrides, refusals."""

from dataclasses import fields

import pytest
import torch

from deepspan.errors import ConfigError
from deepspan.ops.registry import OPS, REFERENCE, OpTable, Provider, bind, reference_ops, resolve


def fast_norm(x, weight, eps):
    return OPS["rms_norm"].reference(x, weight, eps)


def provider(**changes) -> Provider:
    return Provider(**{"op": "rms_norm", "name": "fast", "function": fast_norm} | changes)


def chosen(*providers: Provider, overrides=None, device: str = "cpu", dtype=torch.float32) -> Provider:
    return resolve(device, dtype, providers, overrides)["rms_norm"]


def test_resolve_without_providers_gives_every_reference():
    resolved = resolve("cpu", torch.float32)
    assert resolved.keys() == OPS.keys()
    assert all(p.name == REFERENCE and p.function is OPS[name].reference for name, p in resolved.items())


def test_bind_of_references_equals_reference_ops():
    table = bind(resolve("cpu", torch.float32))
    assert table == reference_ops()
    assert {field.name for field in fields(OpTable)} == OPS.keys()


def test_resolve_takes_first_provider_that_serves():
    assert chosen(provider(), provider(name="second")).name == "fast"
    assert chosen(provider(devices=("cuda",)), provider(name="second")).name == "second"


@pytest.mark.parametrize(
    "changes",
    [{"devices": ("cuda",)}, {"dtypes": (torch.bfloat16,)}, {"available": lambda: False}],
    ids=["device", "dtype", "unavailable"],
)
def test_resolve_of_provider_that_does_not_serve_falls_back_to_reference(changes):
    assert chosen(provider(**changes)).name == REFERENCE


def test_resolve_of_provider_for_other_op_leaves_this_one():
    resolved = resolve("cpu", torch.float32, [provider(op="route")])
    assert (resolved["rms_norm"].name, resolved["route"].name) == (REFERENCE, "fast")


def test_resolve_with_override_takes_named_provider():
    assert chosen(provider(), provider(name="second"), overrides={"rms_norm": "second"}).name == "second"
    assert chosen(provider(), overrides={"rms_norm": REFERENCE}).name == REFERENCE


@pytest.mark.parametrize("changes", [{"devices": ("cuda",)}, {"available": lambda: False}, {"name": "other"}])
def test_resolve_with_override_that_cannot_serve_is_refused_by_name(changes):
    with pytest.raises(ConfigError, match=r"rms_norm.*'fast'.*cpu"):
        chosen(provider(**changes), overrides={"rms_norm": "fast"})


def test_resolve_with_override_of_unknown_op_is_refused_by_name():
    with pytest.raises(ConfigError, match="unknown op 'rmsnorm'"):
        resolve("cpu", torch.float32, overrides={"rmsnorm": REFERENCE})


def test_bound_provider_is_what_the_table_calls():
    table = bind(resolve("cpu", torch.float32, [provider()]))
    assert table.rms_norm is fast_norm
    assert table.route is OPS["route"].reference
