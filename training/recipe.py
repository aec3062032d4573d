"""deepspan-tiny: its configuration and its starting weights.

Field names, tensor names, preprocessing constants, window, ratios and head sizes are those of the release; the rest is
small. Starting values are chosen so that each part begins near the identity: streams are copied, mixes are diagonal.
"""

import math
from typing import Any

import torch

from deepspan.config.model import ModelConfig, parse_model_config
from deepspan.model.drafter import DSpark
from deepspan.model.network import DeepseekV4
from deepspan.ops.registry import OpTable
from deepspan.weights.tiny import tiny_config

RATIOS = (0, 0, 4, 128, 4, 4)
NUM_EXPERTS = 8
TEXT_EXPERTS = range(4, 8)  # where text rows start; image rows start in the others, told apart by bias and bias_vl
START_BIAS = 2.0  # above every difference of scores: the bias decides, not the scores
LOCALITY = 2.0

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 2,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 64,
    "o_groups": 2,
    "o_lora_rank": 64,
    "sliding_window": 128,
    "index_n_heads": 16,
    "index_head_dim": 128,
    "index_topk": 32,
    "n_routed_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "num_hash_layers": 1,
    "vision_n_layers": 3,
    "vision_dim": 128,
    "vision_n_heads": 2,
    "vision_inter_dim": 384,
}


DRAFT_STAGES = 2
NOISE = "<｜fim▁hole｜>"  # what the slots behind the anchor hold; a token nobody says
DRAFT_FIELDS: dict[str, Any] = {
    "compress_ratios": [*RATIOS, *[0] * DRAFT_STAGES],
    "num_nextn_predict_layers": DRAFT_STAGES,
    "dspark_block_size": 5,
    "dspark_target_layer_ids": [3, 4, 5],
    "dspark_markov_rank": 32,
}


def raw_config(vocab_size: int) -> dict[str, Any]:
    """Contents of config.json."""
    return tiny_config(vocab_size=vocab_size, ratios=RATIOS, vision=True, overrides=SIZES)


def with_draft_fields(raw: dict[str, Any], noise_token_id: int) -> dict[str, Any]:
    """The same with draft stages. noise_token_id: input of the slots behind the anchor; a token nobody says."""
    return raw | DRAFT_FIELDS | {"dspark_noise_token_id": noise_token_id}


def model_config(vocab_size: int) -> ModelConfig:
    return parse_model_config(raw_config(vocab_size))


def new_network(config: ModelConfig, ops: OpTable, seed: int) -> DeepseekV4:
    """A network with starting weights, in fp32."""
    network = DeepseekV4(config, ops, torch.float32)
    generator = _start_all(network, config, seed)
    with torch.no_grad():
        for name, table in network.named_buffers():
            assert name.endswith("tid2eid")
            order = torch.rand(table.shape[0], config.n_routed_experts, generator=generator).argsort(1)
            table.copy_(order[:, : table.shape[1]])
    return network


def new_drafter(config: ModelConfig, ops: OpTable, seed: int) -> DSpark:
    """Draft stages with starting weights, in fp32: first without the Markov head's word, and sure of nothing."""
    drafter = DSpark(config, ops, DRAFT_STAGES, torch.float32)
    _start_all(drafter, config, seed)
    with torch.no_grad():
        drafter.markov.markov_w2.weight.zero_()
        drafter.confidence.proj.weight.zero_()
    return drafter


def _start_all(module: torch.nn.Module, config: ModelConfig, seed: int) -> torch.Generator:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            _start(name, parameter, config, generator)
    return generator


def _start(name: str, value: torch.Tensor, config: ModelConfig, generator: torch.Generator) -> None:
    last = name.rsplit(".", 1)[-1]
    num_streams = config.hc_mult
    if "norm" in name:
        value.fill_(1.0)
    elif last.startswith("hc_"):
        _start_hyper(last, value, num_streams, generator)
    elif last in ("bias", "bias_vl") and "gate" in name:
        value.copy_(starting_bias(for_images=last == "bias_vl"))
    elif name.endswith("attn.wqkv.bias"):
        _start_local(value, config)
    elif last in ("bias", "attn_sink", "ape"):
        value.zero_()
    elif name == "embed.weight" or name.startswith("image_"):
        value.normal_(std=0.5, generator=generator)
    else:
        # Projections back into the residual stream start small, so that depth does not drown the embeddings.
        gain = 0.3 if any(part in name for part in ("wo_b", ".w2.", "attn.wo.")) else 1.0
        value.normal_(std=gain / math.sqrt(value.shape[-1]), generator=generator)


def _start_hyper(last: str, value: torch.Tensor, num_streams: int, generator: torch.Generator) -> None:
    if last.endswith("_fn"):
        value.normal_(std=0.02, generator=generator)
    elif last.endswith("_scale"):
        value.fill_(0.3)
    elif last == "hc_head_base":
        value.fill_(_logit(1 / num_streams))
    else:
        # pre: a mean of the streams, each half leaning on one of them; post: 1; mix: near the identity.
        value[:num_streams] = _logit(1 / num_streams)
        value[num_streams : 2 * num_streams] = torch.linspace(-1, 1, num_streams)
        value[2 * num_streams :] = (5 * torch.eye(num_streams) - 2.5).flatten()


def starting_bias(*, for_images: bool) -> torch.Tensor:
    """Correction bias [E] that sends image rows to one half of the experts and text rows to the other."""
    prefers_text = torch.tensor([expert in TEXT_EXPERTS for expert in range(NUM_EXPERTS)])
    return torch.where(prefers_text ^ for_images, START_BIAS, -START_BIAS)


def _start_local(bias: torch.Tensor, config: ModelConfig) -> None:
    """Let the tower begin by looking nearby: equal biases of q and k, turned by their positions, agree at distance 0.

    The heads differ in reach; the last one starts without preference.
    """
    vision = config.vision
    assert vision is not None
    bias.zero_()
    query, key, _ = bias.view(3, vision.n_heads, 2, 2, vision.head_dim // 4).unbind(0)
    num_fast = 5  # angles that turn noticeably within ten patches
    for head in range(vision.n_heads - 1):
        query[head, ..., :num_fast] = key[head, ..., :num_fast] = LOCALITY / (head + 1)


def _logit(probability: float) -> float:
    return math.log(probability / (1 - probability))
