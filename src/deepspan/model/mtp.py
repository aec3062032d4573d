"""Plain MTP: one more layer that guesses the token after the next one, from what the network made of a row.

Row t takes the network's streams at t, before its head, and the embedding of the token at t + 1; it guesses the token
at t + 2. For guesses further on the layer takes its own streams in the place of the network's, and its own guess.

Invariants: a row sees rows up to itself, the last `sliding_window` of them, image rows too; an image row's embedding
joins the row before it as any other; the token that joins a row tells the router its kind; embedding, head and rotary
tables are the network's. The embedding that joins row 0 is zero, as the layer was trained.

Shapes: T rows, n streams, D hidden, V vocabulary.
"""

import torch
from torch import Tensor

from deepspan.config.model import ModelConfig
from deepspan.model.batch import ForwardBatch
from deepspan.model.block import Block, MergesStreams
from deepspan.model.layers import Linear, RMSNorm
from deepspan.model.network import DeepseekV4
from deepspan.model.rope import BatchRope
from deepspan.ops.registry import OpTable


class MtpStage(Block, MergesStreams):
    """The layer, with what joins a token to the streams before it and what stands between it and the head."""

    def __init__(self, config: ModelConfig, ops: OpTable, dtype: torch.dtype) -> None:
        super().__init__(config, ops, ratio=0, is_hash=False, dtype=dtype)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.e_proj = Linear(hidden, hidden, dtype=dtype)
        self.h_proj = Linear(hidden, hidden, dtype=dtype)
        self.enorm = RMSNorm(hidden, eps, ops, dtype=dtype)
        self.hnorm = RMSNorm(hidden, eps, ops, dtype=dtype)
        self.norm = RMSNorm(hidden, eps, ops, dtype=dtype)
        self.add_merge(config)

    def join(self, streams_TnD: Tensor, next_TD: Tensor) -> Tensor:
        """Streams [T, n, D] that the layer begins with. next_TD: embeddings of the tokens behind the rows."""
        before = self.h_proj(self.hnorm(streams_TnD).flatten(0, 1)).view(streams_TnD.shape)
        return before + self.e_proj(self.enorm(next_TD))[:, None]


class Mtp(torch.nn.Module):
    """The stage, under its name in the checkpoint."""

    num_stages = 1

    def __init__(self, config: ModelConfig, ops: OpTable, dtype: torch.dtype) -> None:
        super().__init__()
        self._config, self._ops = config, ops
        self.mtp = torch.nn.ModuleList([MtpStage(config, ops, dtype)])

    @property
    def stage(self) -> MtpStage:
        stage = self.mtp[0]
        assert isinstance(stage, MtpStage)
        return stage

    def forward(self, batch: ForwardBatch, streams_TnD: Tensor, target: DeepseekV4) -> Tensor:
        """The layer's own streams [T, n, D].

        batch: rows at their positions; its tokens and kinds are those at the positions behind them. streams_TnD: of the
        network, or of this layer for the rows of guesses.
        """
        rope = BatchRope(target.rope_tables(batch.positions.device), batch.positions)
        following = target.embed_rows(batch).masked_fill((batch.positions == 0)[:, None], 0)
        cache = batch.caches.layers[0] if batch.caches is not None else None
        return self.stage(self.stage.join(streams_TnD, following), batch, rope, cache)

    def logits(self, streams_RnD: Tensor, target: DeepseekV4) -> Tensor:
        """What the rows guess, fp32 [R, V]. streams_RnD: of `forward`."""
        return target.head(self.stage.norm(self.stage.merge(streams_RnD, self._config, self._ops)))
