"""`deepspan inspect`: tables about what a run would use."""

from rich.console import Console
from rich.table import Table

from deepspan.ops.registry import OPS, resolve
from deepspan.runtime.device import pick_device, pick_dtype
from deepspan.weights.checkpoint import torch_dtype_name


def show_ops(*, device: str, dtype: str) -> None:
    """One line per operation: provider, and what it promises."""
    target = pick_device(device)
    compute = pick_dtype(dtype, target)
    table = Table(title=f"operations on {target.type}, {torch_dtype_name(compute)}")
    for column in ("operation", "provider", "batch-invariant", "capturable", "meaning"):
        table.add_column(column)
    for name, provider in resolve(target.type, compute).items():
        meaning = (OPS[name].reference.__doc__ or "").strip().splitlines()[0]
        yes_no = ["yes" if flag else "no" for flag in (provider.batch_invariant, provider.capturable)]
        table.add_row(name, provider.name, *yes_no, meaning)
    Console().print(table)
