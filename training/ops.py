"""Operations for training: the references, with what the losses need recorded on the way, and cheaper backward passes.

A block here is a whole sequence, so that rows are split and joined, which costs nothing backwards. The recorder pairs
each indexer's scores (with gradient) with the attention that its layer then gave to the entries (without).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from deepspan.ops.blocks import QueryBlock
from deepspan.ops.indexer import index_scores, select_entries
from deepspan.ops.registry import OpTable, reference_ops
from deepspan.ops.router import route
from deepspan.ops.rows import FlatRows


@dataclass
class Recorder:
    """What one forward pass leaves behind. dense: select every visible entry, so that the indexer learns from all.

    index_losses: one per ratio-4 layer. loads: (layer order) expert counts [2, E] of text rows and image rows.
    """

    dense: bool = True
    index_losses: list[Tensor] = field(default_factory=list)
    loads: list[Tensor] = field(default_factory=list)
    _scores: list[Tensor] = field(default_factory=list)

    def clear(self) -> None:
        for kept in (self.index_losses, self.loads, self._scores):
            kept.clear()

    def index_entries(
        self,
        q_THK: Tensor,
        keys: FlatRows,
        weights_TH: Tensor,
        entry_hi_T: Tensor,
        topk: int,
        blocks: Sequence[QueryBlock],
    ) -> Tensor:
        """As the reference, keeping the scores of each sequence for the loss."""
        queries = _lengths(blocks)
        chosen = torch.full((len(q_THK), topk), -1, dtype=torch.int64)
        parts = zip(
            q_THK.split(queries),
            keys.rows.split([block.num_entries for block in blocks]),
            weights_TH.split(queries),
            entry_hi_T.split(queries),
            strict=True,
        )
        for block, (q, k, w, hi) in zip(blocks, parts, strict=True):
            scores = index_scores(q, k, w)
            self._scores.append(scores)
            found = select_entries(scores.detach(), hi, topk)
            chosen[block.queries[0] : block.queries[1], : found.shape[1]] = found
        return chosen

    def sparse_attention(
        self,
        q_THK: Tensor,
        rows: FlatRows,
        row_lo_T: Tensor,
        row_hi_T: Tensor,
        entries: FlatRows | None,
        entry_hi_T: Tensor,
        selected_TM: Tensor | None,
        sink_H: Tensor,
        scale: float,
        blocks: Sequence[QueryBlock],
    ) -> Tensor:
        """As the reference, a sequence at a time."""
        queries, counts = _lengths(blocks), [block.num_entries for block in blocks]
        entry_parts = entries.rows.split(counts) if entries is not None else [None] * len(blocks)
        outputs = []
        for index, (block, q, own, kept) in enumerate(
            zip(blocks, q_THK.split(queries), rows.rows.split(queries), entry_parts, strict=True)
        ):
            (q0, q1), num_entries = block.queries, block.num_entries
            places = torch.arange(q1 - q0)
            mask = (places >= row_lo_T[q0:q1, None]) & (places <= row_hi_T[q0:q1, None])
            keys, visible = own, None
            if kept is not None and num_entries > 0:
                visible = torch.arange(num_entries) < entry_hi_T[q0:q1, None]
                allowed = visible
                if selected_TM is not None and not self.dense:
                    allowed = visible & _as_mask(selected_TM[q0:q1], num_entries)
                mask = torch.cat((mask, allowed), dim=1)
                keys = torch.cat((own, kept))
            out, probs = _attend(q, keys, mask, sink_H, scale)
            outputs.append(out)
            if selected_TM is not None and visible is not None:
                mass = probs.detach()[:, :, q1 - q0 :].sum(1)
                self.index_losses.append(_index_loss(self._scores[index], mass, visible))
        if selected_TM is not None:
            self._scores.clear()
        return torch.cat(outputs)

    def route(self, *arguments: object) -> tuple[Tensor, Tensor]:
        """As the reference, counting the choices."""
        chosen, weights = route(*arguments)  # type: ignore[arg-type]
        gate, is_image = arguments[1], arguments[4]
        assert isinstance(gate, Tensor)
        assert isinstance(is_image, Tensor)
        num_experts = len(gate)
        counts = [torch.bincount(chosen[rows].flatten(), minlength=num_experts) for rows in (~is_image, is_image)]
        self.loads.append(torch.stack(counts))
        return chosen, weights


def training_ops(recorder: Recorder, compiled: bool = True) -> OpTable:
    """The op table of a training run. compiled: fuse the small operations (a minute of compilation at the start)."""
    ops = replace(
        reference_ops(),
        index_entries=recorder.index_entries,
        sparse_attention=recorder.sparse_attention,
        route=recorder.route,
    )
    if compiled:
        fused = ("rms_norm", "apply_rope", "hyper_pre", "hyper_post", "clamped_swiglu", "apply_vision_rope")
        ops = replace(ops, **{name: torch.compile(getattr(ops, name), dynamic=True) for name in fused})
    return ops


def _attend(q_THK: Tensor, keys_SK: Tensor, mask_TS: Tensor, sink_H: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    num_queries, num_heads, dim = q_THK.shape
    scores = (q_THK.reshape(-1, dim) @ keys_SK.T).view(num_queries, num_heads, -1).float() * scale
    scores = scores.masked_fill(~mask_TS[:, None], -torch.inf)
    sink = sink_H[:, None].expand(num_queries, num_heads, 1)
    probs = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
    out = probs.reshape(num_queries * num_heads, -1) @ keys_SK
    return out.view_as(q_THK).to(q_THK.dtype), probs


def _index_loss(scores_TN: Tensor, mass_TN: Tensor, visible_TN: Tensor) -> Tensor:
    """Cross-entropy of the indexer's softmax against the attention mass on the entries; mean over rows with any."""
    total = mass_TN.sum(1, keepdim=True)
    rows = (total[:, 0] > 1e-6) & (visible_TN.sum(1) > 1)
    target = torch.where(rows[:, None], mass_TN / total.clamp(min=1e-6), 0.0)
    log_probs = F.log_softmax(scores_TN.masked_fill(~visible_TN, -1e9), dim=1)
    return -(target * log_probs).sum() / rows.sum().clamp(min=1)


def _as_mask(selected_TM: Tensor, width: int) -> Tensor:
    columns = torch.where(selected_TM < 0, width, selected_TM)
    return torch.zeros(len(selected_TM), width + 1, dtype=torch.bool).scatter_(1, columns, True)[:, :width]


def _lengths(blocks: Sequence[QueryBlock]) -> list[int]:
    """Rows of each sequence; a block must be a whole sequence."""
    assert [block.sequence for block in blocks] == list(range(len(blocks))), "training needs one block per sequence"
    return [block.queries[1] - block.queries[0] for block in blocks]
