"""What each part is worth: accuracy with one part disabled, as a table. `python -m training.ablate MODEL`.

Each ablation replaces one operation by one that leaves the part out, so that the rest of the path is what serves.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from deepspan.core.media import ImageSpan
from deepspan.evaluate import evaluate
from deepspan.llm import LLM
from deepspan.ops.attention import sparse_attention
from deepspan.ops.registry import Provider
from deepspan.ops.router import route
from deepspan.ops.rows import Rows
from deepspan.ops.vision import unfold_tiles
from deepspan.runtime import batch_builder
from deepspan.runtime.visibility import visible_intervals

SKILLS = ("reading", "colour", "shape", "position", "counting", "which", "lookup", "recall", "recall_600")


def without_image_bias(x: Tensor, gate: Tensor, bias: Tensor | None, bias_vl: Tensor, *rest: Any) -> Any:
    """Image rows choose experts by their plain scores."""
    return route(x, gate, bias, torch.zeros_like(bias_vl), *rest)


def with_text_bias(x: Tensor, gate: Tensor, bias: Tensor | None, bias_vl: Tensor, *rest: Any) -> Any:
    """Image rows choose as text does: what a port does that knows one bias only."""
    return route(x, gate, bias, torch.zeros_like(bias_vl) if bias is None else bias, *rest)


def causal_intervals(start: int, end: int, window: int, _spans: Sequence[ImageSpan]) -> tuple[np.ndarray, np.ndarray]:
    """No row sees a later one, image spans included."""
    return visible_intervals(start, end, window, ())


def without_entries(q: Tensor, rows: Rows, row_lo: Tensor, row_hi: Tensor, _entries: Rows | None, *rest: Any) -> Tensor:
    """The window and nothing else."""
    return sparse_attention(q, rows, row_lo, row_hi, None, *rest)


def latest_entries(_q: Tensor, _keys: Rows, _weights: Tensor, entry_hi: Tensor, topk: int, _blocks: Any) -> Tensor:
    """The newest visible entries instead of the indexer's choice."""
    return (entry_hi[:, None] - 1 - torch.arange(topk)).clamp(min=-1)


def scrambled_tiles(x: Tensor, grid_rows: int, grid_cols: int, tile: int) -> Tensor:
    """Every image's cells in a random (but fixed) order."""
    tiles = unfold_tiles(x, grid_rows, grid_cols, tile)
    return tiles[torch.randperm(len(tiles), generator=torch.Generator().manual_seed(0))]


CAUSAL = "causal image spans"  # decided where steps are built, not by an operation
ABLATIONS: dict[str, tuple[str, Callable[..., Any]]] = {
    "bias_vl zeroed": ("route", without_image_bias),
    "the text's bias for bias_vl": ("route", with_text_bias),
    CAUSAL: ("", causal_intervals),
    "no compressed entries": ("sparse_attention", without_entries),
    "latest entries, not the indexer's": ("index_entries", latest_entries),
    "image cells scrambled": ("unfold_tiles", scrambled_tiles),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--questions", type=int, default=100, help="per skill")
    arguments = parser.parse_args()
    print("| ablation | " + " | ".join(SKILLS) + " |")
    print("|---" * (len(SKILLS) + 1) + "|")
    for name, ablation in {"none": None, **ABLATIONS}.items():
        providers = [Provider(op=ablation[0], name=name, function=ablation[1])] if ablation and ablation[0] else []
        llm = LLM(arguments.model, device="cpu", providers=providers)
        intervals = causal_intervals if name == CAUSAL else visible_intervals
        with patch.object(batch_builder, "visible_intervals", intervals):
            scores = evaluate(llm, arguments.questions, skills=SKILLS)
        print(f"| {name} | " + " | ".join(f"{score.accuracy:.0%}" for score in scores) + " |", flush=True)


if __name__ == "__main__":
    main()
