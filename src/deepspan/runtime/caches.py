"""Cache tensors of all layers, and the block tables of the running rows.

Invariants: allocated once, addresses never change; block 0 of every tensor is the null block, which nobody reads or
writes. Sizes come from `kv.families`. Used by `runtime.step_builder`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

import numpy as np
import torch
from torch import Tensor

from deepspan.config.engine import EngineConfig, packed_row_bytes
from deepspan.config.model import OVERLAP_RATIO, ModelConfig
from deepspan.core.step import NewBlocks
from deepspan.kv.families import DRAFT, Family
from deepspan.model.batch import LayerCache
from deepspan.runtime.buffers import Buffer


class Caches:
    """layers, draft_layers: one record per layer of the network and of its drafter.

    tables: int64 [max_num_seqs, blocks of max_model_len], by family name.
    """

    def __init__(
        self,
        config: ModelConfig,
        engine: EngineConfig,
        families: Sequence[Family],
        num_blocks: Mapping[str, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """num_blocks: by family name, null blocks not counted. dtype: of rows; states are fp32.

        With kv_dtype fp8 all rows but the indexer's are bytes (`ops.rounding`).
        """
        sizes = {family.name: (num_blocks[family.name] + 1, family.block_rows) for family in families}
        if engine.kv_dtype == "fp8":
            row_width, row_dtype = packed_row_bytes(config.head_dim, config.qk_rope_head_dim), torch.uint8
        else:
            row_width, row_dtype = config.head_dim, dtype

        def tensor(family: str, width: int, kind: torch.dtype) -> Tensor:
            return _zeros((*sizes[family], width), kind, device)

        def window(family: str) -> LayerCache:
            rows = tensor(family, row_width, row_dtype)
            return LayerCache(window=rows, entries=None, state=None, index=None, index_state=None)

        def layer(ratio: int) -> LayerCache:
            overlap = ratio == OVERLAP_RATIO
            lanes = 4 if overlap else 2  # values and gates; with overlap of both halves
            state = tensor(f"state_{ratio}", lanes * config.head_dim, torch.float32) if ratio else None
            indexed = f"index_{ratio}" if overlap else None
            return replace(
                window("window"),
                entries=tensor(f"rows_{ratio}", row_width, row_dtype) if ratio else None,
                state=state,
                index=tensor(indexed, config.index_head_dim, dtype) if indexed else None,
                index_state=tensor(f"state_{ratio}", 4 * config.index_head_dim, torch.float32) if overlap else None,
            )

        self.layers = tuple(layer(ratio) for ratio in config.compress_ratios)
        stages = next((len(family.layers) for family in families if family.name == DRAFT), 0)
        self.draft_layers = tuple(window(DRAFT) for _ in range(stages))
        longest = -(-(engine.max_model_len + engine.num_drafts) // engine.block_tokens)
        self._tables = {family.name: Buffer((engine.max_num_seqs, longest), device) for family in families}

    @property
    def num_bytes(self) -> int:
        """Of all tensors, null blocks and tables included."""
        tensors = [
            getattr(layer, field.name) for layer in (*self.layers, *self.draft_layers) for field in fields(layer)
        ]
        return sum(t.nbytes for t in tensors if t is not None) + sum(t.num_bytes for t in self._tables.values())

    @property
    def tables(self) -> dict[str, Tensor]:
        return {name: table.device for name, table in self._tables.items()}

    def tables_host(self, family: str) -> np.ndarray:
        return self._tables[family].host

    def update(self, row: int, blocks: Mapping[str, NewBlocks], *, begins: bool) -> None:
        """Let blocks join the tables of a row; emptied first if another sequence begins there."""
        for name, table in self._tables.items():
            if begins:
                table.host[row] = 0
            new = blocks.get(name)
            if new is not None:
                table.host[row, new.first : new.first + len(new.blocks)] = new.blocks
            if begins or new is not None:
                table.upload_row(row)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on CPU pages that cost memory only once they are written to, which `torch.zeros` would do at once."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
