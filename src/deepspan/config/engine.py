"""How an engine is run: limits and cache sizes, checked once against the model.

Owns the start-up checks without which a request would wait for ever (an image larger than a step) or be cut. Called by
`llm`, read by `kv` and `sched`; never imports torch.
"""

from dataclasses import dataclass, fields, replace

from deepspan.config.model import OVERLAP_RATIO, ModelConfig
from deepspan.errors import ConfigError

LEAD_PADS = OVERLAP_RATIO - 1  # an image starts with up to three pads, so that START stands at 3 (mod 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Limits of one engine. All counts are tokens unless the name says otherwise.

    block_tokens: source tokens of one cache block in every family; a multiple of every compress ratio.
    max_model_len: prompt and output of one request together. max_num_seqs: requests running at once.
    max_batched_tokens: rows of one step. chunk_tokens: rows of one request in one step, 0 for no limit of its own; an
    image is taken whole even where it is longer.
    num_drafts: draft tokens verified per request and step. encoder_rows: rows of encoder output that are kept.
    prefix_caching: reuse blocks of earlier requests.
    """

    block_tokens: int = 128
    max_model_len: int = 131_072
    max_num_seqs: int = 32
    max_batched_tokens: int = 2048
    chunk_tokens: int = 0
    num_drafts: int = 0
    encoder_rows: int = 8192
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        at_least_one = ("block_tokens", "max_model_len", "max_num_seqs", "max_batched_tokens", "encoder_rows")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "prefix_caching":
                if not isinstance(value, bool):
                    raise ConfigError(f"prefix_caching must be true or false, found {value!r}")
                continue
            least = int(field.name in at_least_one)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{field.name} must be an integer of at least {least}, found {value!r}")

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


def largest_placeholder(model: ModelConfig) -> int:
    """Tokens of the longest image with its lead pads; 0 without vision."""
    return model.vision.max_n_token + LEAD_PADS if model.vision is not None else 0
