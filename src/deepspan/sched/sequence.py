"""Progress of one request, and where a chunk of it may end.

Owns everything about a request that changes. Called by `sched.scheduler`.
"""

from bisect import bisect_right
from dataclasses import dataclass, field

from deepspan.core.request import Request

Tokens = tuple[int, ...]
Order = tuple[int, int]  # priority, then arrival: the lowest is served first


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """token_ids: prompt and what was generated, one list for as long as the request lives.

    num_computed: tokens whose cache rows exist. num_cached: of the prompt's, those found at first admission, None
    before it. row: of the runtime's buffers, None while waiting. after: id of a request whose prompt must be computed
    first, so that this one can share it. held: digests of images that are kept for it. drafts: guesses for the tokens
    behind the last one. is_drafted: whether there may be any. redrafts: guesses were lost with the row, and
    are made anew before the next token is chosen.
    """

    request_id: int
    request: Request
    order: Order
    token_ids: list[int]
    after: int | None = None
    num_computed: int = 0
    num_cached: int | None = None
    row: int | None = None
    held: set[str] = field(default_factory=set)
    drafts: Tokens = ()
    is_drafted: bool = True
    redrafts: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.token_ids)

    @property
    def num_wanted(self) -> int:
        """Tokens whose rows are wanted before the request goes on: the newest one is left for the guesses behind it."""
        return len(self.token_ids) - self.redrafts

    @property
    def is_decoding(self) -> bool:
        """Whether only the last generated token is left to compute."""
        return self.num_computed == len(self.token_ids) - 1 >= self.num_prompt_tokens

    @property
    def usable_drafts(self) -> Tokens:
        """Drafts that can still become part of the output: one token always comes behind them."""
        left = self.request.params.max_tokens - (len(self.token_ids) - self.num_prompt_tokens)
        return self.drafts[: max(0, left - 1)]

    def chunk_end(self, start: int, most: int, soft: int) -> int:
        """End of the chunk from `start`: at most `soft` tokens, but an image is taken whole if it is within `most`.

        A chunk ends before an image that it would cut. Equals `start` if the image that begins there does not fit.
        """
        end = min(self.num_wanted, start + min(soft, most))
        spans = self.request.spans
        index = bisect_right(spans, end - 1, key=lambda span: span.offset) - 1
        if index < 0 or spans[index].last < end:
            return end
        span = spans[index]
        if span.offset > start:
            return span.offset
        assert span.offset == start, "a chunk never starts inside an image"
        return span.last + 1 if span.last + 1 - start <= most else start

    def images_in(self, start: int, end: int) -> range:
        """Numbers of the images whose placeholders lie in [start, end)."""
        spans = self.request.spans
        first = bisect_right(spans, start - 1, key=lambda span: span.offset)
        return range(first, bisect_right(spans, end - 1, key=lambda span: span.offset))
