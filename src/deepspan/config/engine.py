"""How an engine is run: limits and cache sizes, checked once against the model.

Owns the start-up checks without which a request would wait for ever (an image larger than a step) or be cut. Called by
`llm`, read by `kv` and `sched`; never imports torch.
"""

from dataclasses import dataclass, fields, replace
from typing import Literal

from deepspan.config.model import OVERLAP_RATIO, ModelConfig
from deepspan.errors import ConfigError

LEAD_PADS = OVERLAP_RATIO - 1  # an image starts with up to three pads, so that START stands at 3 (mod 4)
MAX_DRAFTS = 8
DRAFT_METHODS = ("off", "auto", "dspark", "mtp")
DRAFT_RULES = ("standard", "block")
DRAFT_SAMPLINGS = ("greedy", "sampled")
KV_GROUP = 64  # numbers of a row that share a scale with kv_dtype fp8
SCALES_ALIGNED = 8  # bytes of a row's scales are a multiple of this
_CHOICES = {
    "draft_method": DRAFT_METHODS,
    "draft_rule": DRAFT_RULES,
    "draft_sampling": DRAFT_SAMPLINGS,
    "draft_depth": ("fixed", "auto"),
    "kv_dtype": ("auto", "bfloat16", "fp8"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Limits of one engine. All counts are tokens unless the name says otherwise.

    block_tokens: source tokens of one cache block in every family; a multiple of every compress ratio.
    max_model_len: prompt and output of one request together. max_num_seqs: requests running at once.
    max_batched_tokens: rows of one step. chunk_tokens: rows of one request in one step, 0 for no limit of its own; an
    image is taken whole even where it is longer.
    draft_method: kind of the checkpoint's draft stages to guess with; auto takes what there is, or none. num_drafts:
    draft tokens verified per request and step; 0 takes what the stages were made for, if there is a method.
    draft_rule: how sampled drafts are judged, each alone or a block at a time (which takes more). draft_sampling:
    whether drafts of sampled requests are the likeliest tokens or drawn at the request's temperature. draft_depth:
    always `num_drafts`, or as many as pay.
    kv_dtype: how cached rows are kept: as they are computed, as bf16, or as the release rounds them (a byte a number,
    the rotary dims bf16). encoder_rows: rows of encoder output that are kept.
    prefix_caching: reuse blocks of earlier requests.
    """

    block_tokens: int = 128
    max_model_len: int = 131_072
    max_num_seqs: int = 32
    max_batched_tokens: int = 2048
    chunk_tokens: int = 0
    draft_method: Literal["off", "auto", "dspark", "mtp"] = "off"
    num_drafts: int = 0
    draft_rule: Literal["standard", "block"] = "standard"
    draft_sampling: Literal["greedy", "sampled"] = "greedy"
    draft_depth: Literal["fixed", "auto"] = "fixed"
    kv_dtype: Literal["auto", "bfloat16", "fp8"] = "auto"
    encoder_rows: int = 8192
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        at_least_one = ("block_tokens", "max_model_len", "max_num_seqs", "max_batched_tokens", "encoder_rows")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _CHOICES:
                if value not in _CHOICES[field.name]:
                    raise ConfigError(f"{field.name} must be one of {', '.join(_CHOICES[field.name])}, found {value!r}")
                continue
            if field.name == "prefix_caching":
                if not isinstance(value, bool):
                    raise ConfigError(f"prefix_caching must be true or false, found {value!r}")
                continue
            least = int(field.name in at_least_one)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{field.name} must be an integer of at least {least}, found {value!r}")
        if self.num_drafts > MAX_DRAFTS:
            raise ConfigError(f"num_drafts may be {MAX_DRAFTS} at most, found {self.num_drafts}")

    def checked(self, model: ModelConfig) -> "EngineConfig":
        """This configuration fitted to a model: its length is cut to what the model was made for.

        Raises ConfigError naming both numbers if the model cannot be served within these limits.
        """
        for ratio in model.ratios_in_use():
            if self.block_tokens % ratio:
                raise ConfigError(f"block_tokens {self.block_tokens} is not a multiple of compress ratio {ratio}")
        decode_rows = self.max_num_seqs * (1 + self.num_drafts)
        largest = largest_placeholder(model)
        if largest > self.max_batched_tokens:
            raise ConfigError(
                f"the largest image takes {largest} tokens in one step, max_batched_tokens is {self.max_batched_tokens}"
            )
        # Decodes are served first; with less than this left over, an image would wait for as long as they run.
        if largest + decode_rows > self.max_batched_tokens:
            raise ConfigError(
                f"max_batched_tokens {self.max_batched_tokens} is below {largest + decode_rows}: {decode_rows} for "
                f"max_num_seqs {self.max_num_seqs} with {self.num_drafts} drafts, and {largest} for the largest image"
            )
        if model.vision is not None and self.encoder_rows < model.vision.max_n_token:
            raise ConfigError(
                f"encoder_rows {self.encoder_rows} is below the rows of one image, {model.vision.max_n_token}"
            )
        return replace(self, max_model_len=min(self.max_model_len, model.max_position_embeddings))

    def with_drafts(self, model: ModelConfig, stored: Literal["dspark", "mtp"] | None) -> "EngineConfig":
        """This configuration with a definite method and number of drafts: if none is given, what stages were made for.

        stored: kind of the draft stages that were loaded. With `auto`, and no number given, drafts take no more than
        the room of a step leaves them. Raises ConfigError if a number is given and there is nothing to draft with.
        """
        if self.draft_method == "auto" and stored is None:
            if self.num_drafts:
                raise ConfigError(f"num_drafts is {self.num_drafts}, the checkpoint has no draft stages (mtp.*)")
            return replace(self, draft_method="off")
        if self.draft_method == "off":
            if self.num_drafts:
                raise ConfigError(f"num_drafts is {self.num_drafts} and draft_method is off: nothing would draft")
            return self
        assert stored is not None, "the loader refuses what is not there"
        assert self.draft_method in ("auto", stored), "the loader refuses what is another kind"
        made_for = model.draft.block_size if stored == "dspark" and model.draft is not None else 1
        if self.draft_method == "auto":
            room = (self.max_batched_tokens - largest_placeholder(model)) // self.max_num_seqs - 1
            made_for = max(1, min(made_for, room))
        return replace(self, draft_method=stored, num_drafts=self.num_drafts or min(made_for, MAX_DRAFTS))


def packed_row_bytes(width: int, rope_dims: int) -> int:
    """Bytes of a cached row with kv_dtype fp8: a byte a number, 2 a rotary dim, a scale per 64 numbers padded to 8.

    584 in the release: 448 + 2 x 64 + 8.
    """
    groups = -(-(width - rope_dims) // KV_GROUP)
    return width + rope_dims + -(-groups // SCALES_ALIGNED) * SCALES_ALIGNED


def largest_placeholder(model: ModelConfig) -> int:
    """Tokens of the longest image with its lead pads; 0 without vision."""
    return model.vision.max_n_token + LEAD_PADS if model.vision is not None else 0
