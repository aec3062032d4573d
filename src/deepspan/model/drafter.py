"""DSpark draft stages: a few layers that guess the next tokens of a sequence all at once.

A block of slots starts at the newest token (the anchor, at position P) and goes on with noise tokens; slot k guesses
the token at P + k + 1. Its slots see each other in both directions and the last `sliding_window` positions before P,
whose keys are made from what the backbone computed there (`context`), not from the stages' own rows. A low-rank Markov
head then ties each guess to the one before it.

Invariants: draft rows are text to the router (`bias_vl` is loaded and never acts); stages use their own key projection
on the same context; embedding, head and rotary tables are the backbone's.

Shapes: T rows of the backbone, R draft rows, n streams, D hidden, V vocabulary, K head dim.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from deepspan.config.model import ModelConfig
from deepspan.model.batch import ForwardBatch
from deepspan.model.block import Block, MergesStreams
from deepspan.model.layers import Embedding, Linear, RMSNorm
from deepspan.model.network import DeepseekV4
from deepspan.model.rope import BatchRope
from deepspan.ops.registry import OpTable


class MarkovHead(torch.nn.Module):
    """What the token before says about the next one: `markov_w2 . markov_w1[token]`, of low rank."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.draft is not None
        self.markov_w1 = Embedding(config.vocab_size, config.draft.markov_rank, dtype=dtype)
        self.markov_w2 = Linear(config.draft.markov_rank, config.vocab_size, dtype=dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: int64 [...]. Logits to add, fp32 [..., V]."""
        return self.markov_w2(self.markov_w1(tokens)).float()


class ConfidenceHead(torch.nn.Module):
    """How likely a guess is accepted if those before it were."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.draft is not None
        self.proj = Linear(config.hidden_size + config.draft.markov_rank, 1, dtype=dtype)

    def forward(self, hidden_RD: Tensor, before_RM: Tensor) -> Tensor:
        """hidden_RD: merged streams before the norm. before_RM: `markov_w1` of the tokens before. Logits, fp32 [R]."""
        joined = torch.cat((hidden_RD, before_RM.to(hidden_RD.dtype)), dim=-1)
        return F.linear(joined.float(), self.proj.weight.float())[..., 0]


class DraftStage(Block, MergesStreams):
    """One stage. The first projects the context for all of them, the last has what comes before and behind the head."""

    def __init__(self, config: ModelConfig, ops: OpTable, dtype: torch.dtype, *, is_first: bool, is_last: bool) -> None:
        super().__init__(config, ops, ratio=0, is_hash=False, dtype=dtype)
        assert config.draft is not None
        hidden = config.hidden_size
        if is_first:
            self.main_proj = Linear(hidden * len(config.draft.target_layer_ids), hidden, dtype=dtype)
            self.main_norm = RMSNorm(hidden, config.rms_norm_eps, ops, dtype=dtype)
        if is_last:
            self.add_merge(config)
            self.norm = RMSNorm(hidden, config.rms_norm_eps, ops, dtype=dtype)
            self.markov_head = MarkovHead(config, dtype)
            self.confidence_head = ConfidenceHead(config, dtype)


class DSpark(torch.nn.Module):
    """All stages, under their names in the checkpoint."""

    def __init__(self, config: ModelConfig, ops: OpTable, num_stages: int, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.draft is not None, "DSpark needs its fields in config.json"
        self._config, self._ops, self.draft = config, ops, config.draft
        self.mtp = torch.nn.ModuleList(
            DraftStage(config, ops, dtype, is_first=stage == 0, is_last=stage == num_stages - 1)
            for stage in range(num_stages)
        )

    @property
    def num_stages(self) -> int:
        return len(self.mtp)

    @property
    def _stages(self) -> list[DraftStage]:
        return [stage for stage in self.mtp if isinstance(stage, DraftStage)]

    @property
    def markov(self) -> MarkovHead:
        return self._stages[-1].markov_head

    @property
    def confidence(self) -> ConfidenceHead:
        return self._stages[-1].confidence_head

    def context(self, streams: Mapping[int, Tensor]) -> Tensor:
        """What the backbone knows of its rows: [T, D]. streams: raw [T, n, D], by layer, of `target_layer_ids`."""
        joined = torch.cat([streams[layer].mean(1) for layer in self.draft.target_layer_ids], dim=-1)
        first = self._stages[0]
        return first.main_norm(first.main_proj(joined))

    def context_rows(self, context_TD: Tensor, rope: BatchRope) -> list[Tensor]:
        """Keys of the context, of each stage: [T, K], rotated at the rows' positions."""
        return [stage.attn.new_rows(context_TD, rope) for stage in self._stages]

    def forward(self, batch: ForwardBatch, target: DeepseekV4) -> tuple[Tensor, Tensor]:
        """Blocks of slots, one per part of the batch: (logits before the Markov head, fp32 [R, V]; hidden [R, D]).

        hidden: merged streams before the norm, for the confidence head.
        """
        rope = BatchRope(target.rope_tables(batch.positions.device), batch.positions)
        streams = target.embed(batch.token_ids)[:, None].expand(-1, self._config.hc_mult, -1)
        for index, stage in enumerate(self._stages):
            cache = batch.caches.layers[index] if batch.caches is not None else None
            streams = stage(streams, batch, rope, cache)
        last = self._stages[-1]
        hidden = last.merge(streams, self._config, self._ops)
        return target.head(last.norm(hidden)), hidden


def slot_tokens(anchor: int, width: int, noise: int) -> Sequence[int]:
    """Inputs of a block of slots."""
    return [anchor, *[noise] * (width - 1)]
