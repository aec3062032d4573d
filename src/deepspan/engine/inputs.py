"""From what a user gives to a `Request`: encode, decode images, expand every image slot where it stands.

Invariants: images keep their order between the texts; lead pads are resolved left to right on the expanded prompt, from
the true position of each block; the number of slots equals the number of images. No torch. Called by `llm`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from deepspan.config.model import ModelConfig
from deepspan.core.media import ImageSpan, PreparedImage, TokenKind
from deepspan.core.request import RAW, OutputForm, Request
from deepspan.core.sampling import SamplingParams
from deepspan.errors import ContextError, ImageError, InputError
from deepspan.image.decode import DEFAULT_LIMITS, ImageLimits, ImageMode
from deepspan.image.layout import num_lead_pads, place
from deepspan.image.prepare import prepare_image
from deepspan.text.chat import encode_chat
from deepspan.text.grammar import GrammarCompiler
from deepspan.text.segments import ImageSlot, Segment, Text
from deepspan.text.switches import ChatOptions
from deepspan.text.tokenizer import Tokenizer


class InputBuilder:
    """Builds requests for one model. Thread-safe: nothing changes but the grammars that are remembered."""

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer,
        *,
        max_model_len: int | None = None,
        image_mode: ImageMode = "serving",
        limits: ImageLimits = DEFAULT_LIMITS,
    ) -> None:
        """max_model_len: tokens of prompt and output together, by default what the model was made for."""
        self._config, self._tokenizer = config, tokenizer
        self._max_model_len = max_model_len or config.max_position_embeddings
        self._image_mode, self._limits = image_mode, limits
        self._grammars = GrammarCompiler(tokenizer)
        self._max_characters = self._max_model_len * tokenizer.longest_token

    def from_messages(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions, params: SamplingParams
    ) -> Request:
        """Chat messages with image parts. Raises InputError naming the message and part at fault."""
        return self.from_segments(encode_chat(messages, options), options, params)

    def from_segments(
        self,
        segments: Sequence[Segment],
        options: ChatOptions,
        params: SamplingParams,
        *,
        sources: Sequence[object] | None = None,
        fit: bool = False,
        cache_salt: bytes = b"",
    ) -> Request:
        """An encoded chat. sources: of its images in order, where the slots hold addresses.

        fit: max_tokens is cut to what the context has room for, instead of being refused.
        """
        self._check_length(sum(len(segment.text) for segment in segments if isinstance(segment, Text)))
        ids = self._tokenizer.encode(segments)
        slots = [segment for segment in segments if isinstance(segment, ImageSlot)]
        if sources is not None:
            slots = [replace(slot, source=source) for slot, source in zip(slots, sources, strict=True)]
        images = [self._prepare(slot) for slot in slots]
        tools = {tool.name: tool.parameters for tool in options.offered_tools}
        form = OutputForm(is_chat=True, tools=tools or None)
        return self._request(ids, images, params, form=form, fit=fit, cache_salt=cache_salt)

    def from_prompt(
        self, prompt: str | Sequence[int], params: SamplingParams, *, fit: bool = False, cache_salt: bytes = b""
    ) -> Request:
        """Raw text (nothing is added, special strings count) or vocabulary ids, without images."""
        if isinstance(prompt, str):
            ids: Sequence[int] = self.encode_raw(prompt)
        elif not isinstance(prompt, Sequence | np.ndarray) or isinstance(prompt, bytes | bytearray):
            raise InputError(f"a prompt must be text or a list of token ids, found {type(prompt).__name__}")
        else:
            ids = prompt
            for token_id in prompt:
                self._check_id(token_id)
        return self._request(ids, [], params, fit=fit, cache_salt=cache_salt)

    def encode_raw(self, text: str) -> list[int]:
        """Ids of raw text, however many, as long as they could fit. Raises InputError."""
        self._check_length(len(text))
        return self._tokenizer.encode_raw(text)

    def _check_length(self, num_characters: int) -> None:
        """Refuse what cannot fit before hours are spent on its tokens."""
        if num_characters > self._max_characters:
            raise ContextError(
                f"a prompt of {num_characters} characters has more tokens than max_model_len {self._max_model_len}"
            )

    def _prepare(self, slot: ImageSlot) -> PreparedImage:
        vision = self._config.vision
        assert vision is not None, "the tokenizer refuses image slots without vision"
        if not isinstance(slot.source, Path | bytes | Image.Image):
            raise InputError(
                f"{slot.where}: an image must be a pathlib.Path, bytes or a PIL image here, "
                f"found {type(slot.source).__name__}; addresses are not fetched"
            )
        try:
            return prepare_image(slot.source, vision, mode=self._image_mode, limits=self._limits)
        except ImageError as error:
            raise ImageError(f"{slot.where}: {error}") from error

    def _check_id(self, token_id: Any) -> None:
        size, special = self._config.vocab_size, self._tokenizer.special
        if isinstance(token_id, bool) or not isinstance(token_id, int | np.integer) or not 0 <= token_id < size:
            raise InputError(f"token id {token_id!r} is outside the vocabulary of {size}")
        if token_id == special.image or special.is_sentinel(int(token_id)):
            raise InputError(f"token id {token_id} stands for an image; give images in chat messages")

    def _check_params(self, params: SamplingParams) -> None:
        names = ("stop_token_ids", "allowed_token_ids", "logit_bias")
        named = [(name, getattr(params, name)) for name in names]
        for name, token_ids in [*named, *(("bad_words", word) for word in params.bad_words)]:
            for token_id in token_ids:
                if token_id >= self._config.vocab_size:
                    raise InputError(
                        f"{name}: token id {token_id} is outside the vocabulary of {self._config.vocab_size}"
                    )

    def _request(
        self,
        ids: Sequence[int],
        images: Sequence[PreparedImage],
        params: SamplingParams,
        *,
        form: OutputForm = RAW,
        fit: bool = False,
        cache_salt: bytes = b"",
    ) -> Request:
        self._check_params(params)
        token_ids, kinds, spans = expand_images(ids, images, self._tokenizer)
        room = self._max_model_len - len(token_ids)
        if room < 1 or (room < params.max_tokens and not fit):
            raise ContextError(
                f"{len(token_ids)} prompt tokens and max_tokens {params.max_tokens} are more than max_model_len "
                f"{self._max_model_len}"
            )
        if room < params.max_tokens:
            params = replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))
        # Compiled here, in the thread of whoever asks: the engine's has others to serve.
        grammar = self._grammars.compile(params.grammar, params.n) if params.grammar is not None else None
        return Request(
            token_ids=token_ids,
            kinds=kinds,
            spans=spans,
            images=tuple(images),
            params=params,
            form=form,
            cache_salt=cache_salt,
            grammar=grammar,
        )


def expand_images(
    ids: Sequence[int], images: Sequence[PreparedImage], tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray, tuple[ImageSpan, ...]]:
    """Replace each image slot by lead pads and the image's block.

    Returns (token ids int64 [T], kinds int8 [T], spans). Raises InputError if slots and images differ in number.
    """
    special = tokenizer.special
    num_slots = sum(token_id == special.image for token_id in ids) if special.image is not None else 0
    if num_slots != len(images):
        raise InputError(f"the prompt has {num_slots} image slots and {len(images)} images")
    token_ids: list[np.ndarray] = []
    kinds: list[np.ndarray] = []
    spans: list[ImageSpan] = []
    position = 0
    waiting = iter(images)
    for token_id in ids:
        if special.image is not None and special.sentinel_base is not None and token_id == special.image:
            block = next(waiting).block
            pads = np.full(num_lead_pads(position), TokenKind.PAD, dtype=np.int8)
            spans.append(place(block, position))
            kinds.append(np.concatenate((pads, block.kinds)))
            token_ids.append(special.sentinel_base + kinds[-1].astype(np.int64))
        else:
            kinds.append(np.full(1, TokenKind.TEXT, dtype=np.int8))
            token_ids.append(np.full(1, token_id, dtype=np.int64))
        position += len(kinds[-1])
    if not kinds:
        raise InputError("the prompt is empty")
    return np.concatenate(token_ids), np.concatenate(kinds), tuple(spans)
