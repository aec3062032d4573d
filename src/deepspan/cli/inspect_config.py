"""`deepspan inspect config`: what the configuration of a model says, as deepspan has understood it; no torch."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deepspan.bundled import bundled_model
from deepspan.config.engine import largest_placeholder
from deepspan.config.model import OVERLAP_RATIO, ModelConfig, load_model_config
from deepspan.config.quantisation import ASCEND_METHOD, FP8_METHOD

Row = tuple[str, str]


def show_config(*, model: Path | None, as_json: bool) -> None:
    """Print the table (or all fields as JSON) to stdout. Raises ConfigError naming the field that cannot be served."""
    folder = model or bundled_model()
    config = load_model_config(folder)
    if as_json:
        print(json.dumps(asdict(config), indent=2))
        return
    table = Table(title=f"configuration of {folder.name}", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for section in (_network(config), _experts(config), _vision(config), _drafts(config), _formats(config)):
        for row in section:
            table.add_row(*row)
        table.add_section()
    Console(highlight=False).print(table)


def _network(config: ModelConfig) -> Iterator[Row]:
    yield "vocabulary", f"{config.vocab_size:,}"
    yield "hidden size", f"{config.hidden_size:,} in {config.hc_mult} streams, {config.hc_sinkhorn_iters} iterations"
    yield "layers", f"{config.num_hidden_layers}: {', '.join(_ratios(config))}"
    yield "compress ratios", _runs(config.compress_ratios)
    yield (
        "attention",
        f"{config.num_attention_heads} heads of {config.head_dim} ({config.qk_rope_head_dim} rotary), queries by rank "
        f"{config.q_lora_rank}, outputs in {config.o_groups} groups by rank {config.o_lora_rank}",
    )
    yield "window", f"{config.sliding_window:,} tokens"
    if OVERLAP_RATIO in config.compress_ratios:
        yield (
            "indexer",
            f"{config.index_n_heads} heads of {config.index_head_dim} choose {config.index_topk:,} entries",
        )
    yield "context", f"{config.max_position_embeddings:,} tokens"
    rope = config.rope
    yield (
        "rotary base",
        f"{rope.theta:,g}; compressed layers {rope.compress_theta:,g} with YaRN: factor {rope.factor:g} from "
        f"{rope.original_max_position_embeddings:,} tokens",
    )
    yield "norms", f"eps {config.rms_norm_eps:g}"


def _ratios(config: ModelConfig) -> Iterator[str]:
    for ratio, count in sorted(Counter(config.compress_ratios).items()):
        kind = "window only" if not ratio else f"ratio {ratio}{' with indexer' if ratio == OVERLAP_RATIO else ''}"
        yield f"{count} {kind}"


def _runs(ratios: tuple[int, ...]) -> str:
    """`0 0 (4 128) x 20 4`: the longest run of a repeated pair is shown once."""
    best = max(
        ((_repeats(ratios, start), start) for start in range(len(ratios))), key=lambda found: (found[0], -found[1])
    )
    count, start = best
    if count < 3:
        return " ".join(map(str, ratios))
    pair = f"({ratios[start]} {ratios[start + 1]}) x {count}"
    return " ".join((*map(str, ratios[:start]), pair, *map(str, ratios[start + 2 * count :])))


def _repeats(ratios: tuple[int, ...], start: int) -> int:
    """How many times the two ratios at `start` follow each other from there."""
    count = 0
    while len(pair := ratios[start + 2 * count : start + 2 * count + 2]) == 2 and pair == ratios[start : start + 2]:
        count += 1
    return count


def _experts(config: ModelConfig) -> Iterator[Row]:
    yield (
        "experts",
        f"{config.n_routed_experts} routed and 1 shared, width {config.moe_intermediate_size:,}; "
        f"{config.num_experts_per_tok} compute a token, weights times {config.routed_scaling_factor:g}, "
        f"gates cut at {config.swiglu_limit:g}",
    )
    yield "hash layers", f"the first {config.num_hash_layers}" if config.num_hash_layers else "none"


def _vision(config: ModelConfig) -> Iterator[Row]:
    vision = config.vision
    if vision is None:
        yield "vision", "none: images are refused"
        return
    yield (
        "vision",
        f"{vision.n_layers} layers, width {vision.dim:,}, {vision.n_heads} heads of {vision.head_dim}, "
        f"inner {vision.inter_dim:,}",
    )
    yield (
        "images",
        f"patches of {vision.patch_size} pixels, {vision.downsample_ratio} x {vision.downsample_ratio} of them a "
        f"token; at least {vision.min_pixels:,} pixels, at most {vision.max_n_token:,} tokens "
        f"({largest_placeholder(config):,} with lead pads), sides up to {vision.max_wh_ratio} : 1",
    )


def _drafts(config: ModelConfig) -> Iterator[Row]:
    stages, draft = config.num_draft_ratios, config.draft
    if draft is not None:
        layers = ", ".join(map(str, draft.target_layer_ids))
        yield (
            "drafts",
            f"DSpark, {stages} stages: blocks of {draft.block_size} from layers {layers}, Markov rank "
            f"{draft.markov_rank}, noise token {draft.noise_token_id}",
        )
    else:
        yield "drafts", f"MTP, {stages} stages" if stages else "none"


def _formats(config: ModelConfig) -> Iterator[Row]:
    method, experts = config.quantisation.method, config.quantisation.expert_dtype
    words = {FP8_METHOD: "FP8 in blocks of 128 x 128", ASCEND_METHOD: "as the export's own description says"}
    yield "linear layers", words[method] if method else config.torch_dtype
    same = "as linear layers" if method else config.torch_dtype
    yield "routed experts", experts.upper() if experts else same
    yield "all else", f"{config.torch_dtype}, fp32 where the network asks for it"
