"""Mixture of experts of one layer: router, routed experts, shared expert.

Invariants: raw ids and token kinds reach every gate; a text row's routing does not depend on image rows; the shared
expert is clamped like the routed ones and is not scaled.

Shapes: T rows, D hidden, E experts, A active experts, V vocabulary.
"""

import torch
from torch import Tensor

from deepspan.config.model import ModelConfig
from deepspan.core.media import TokenKind
from deepspan.model.batch import ForwardBatch
from deepspan.model.layers import Linear, empty
from deepspan.ops.formats import Format
from deepspan.ops.registry import OpFunction, OpTable


class Gate(torch.nn.Module):
    """Router of one layer: `weight` [E, D] fp32, and by layer kind `tid2eid` [V, A] (hash) or `bias` [E] (scored).

    Vision checkpoints add `bias_vl` [E] everywhere, and a `bias` in hash layers that the release never reads: the
    loader leaves that one out by name.
    """

    def __init__(self, config: ModelConfig, ops: OpTable, is_hash: bool) -> None:
        super().__init__()
        self._ops, self._num_active, self._scaling = ops, config.num_experts_per_tok, config.routed_scaling_factor
        num_experts = config.n_routed_experts
        self.weight = empty(num_experts, config.hidden_size, dtype=torch.float32)
        self.bias = None if is_hash else empty(num_experts, dtype=torch.float32)
        self.bias_vl = empty(num_experts, dtype=torch.float32) if config.vision else None
        table = torch.empty(config.vocab_size, self._num_active, dtype=torch.int64) if is_hash else None
        self.register_buffer("tid2eid", table)

    def forward(self, x_TD: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Expert ids int64 [T, A] and their weights fp32 [T, A]."""
        is_image = batch.kinds != TokenKind.TEXT
        return self._ops.route(
            x_TD, self.weight, self.bias, self.bias_vl, is_image, self.tid2eid, batch.token_ids,
            self._num_active, self._scaling,
        )  # fmt: skip


class Expert(torch.nn.Module):
    """One clamped SwiGLU network: `w1` gate, `w3` up [I, D], `w2` down [D, I]."""

    def __init__(self, config: ModelConfig, ops: OpTable, dtype: torch.dtype) -> None:
        super().__init__()
        self._ops, self._limit = ops, config.swiglu_limit
        self.w1 = Linear(config.hidden_size, config.moe_intermediate_size, dtype=dtype)
        self.w2 = Linear(config.moe_intermediate_size, config.hidden_size, dtype=dtype)
        self.w3 = Linear(config.hidden_size, config.moe_intermediate_size, dtype=dtype)

    def forward(self, x_TD: Tensor) -> Tensor:
        hidden = self._ops.clamped_swiglu(self.w1(x_TD), self.w3(x_TD), self._limit)
        return self.w2(hidden.to(x_TD.dtype))


class MoE(torch.nn.Module):
    """Routed experts plus the shared one, summed in fp32."""

    def __init__(self, config: ModelConfig, ops: OpTable, dtype: torch.dtype, *, is_hash: bool) -> None:
        super().__init__()
        self._ops, self._limit = ops, config.swiglu_limit
        self.gate = Gate(config, ops, is_hash)
        self.experts = torch.nn.ModuleList(Expert(config, ops, dtype) for _ in range(config.n_routed_experts))
        self.shared_experts = Expert(config, ops, dtype)

    def forward(self, x_TD: Tensor, batch: ForwardBatch) -> Tensor:
        """x_TD: output of `ffn_norm`. Returns [T, D]."""
        expert_ids, weights = self.gate(x_TD, batch)
        w1, w3, w2 = ([getattr(expert, name).operand for expert in self.experts] for name in ("w1", "w3", "w2"))
        routed = self._experts_op()(x_TD, expert_ids, weights, w1, w3, w2, self._limit)
        return (routed + self.shared_experts(x_TD).float()).to(x_TD.dtype)

    def _experts_op(self) -> OpFunction:
        """By format, which the loader has seen to be the same for all experts of a layer."""
        first = self.experts[0]
        assert isinstance(first, Expert)
        match first.w1.format:
            case Format.FP8:
                return self._ops.experts_fp8
            case Format.FP4:
                return self._ops.experts_fp4
            case Format.INT8:
                return self._ops.experts_int8
            case Format.INT4:
                return self._ops.experts_int4
            case None:
                return self._ops.routed_experts
            case other:
                raise AssertionError(f"no experts in {other}")
