"""What one step computes, and what came of it: plain integers from the scheduler to the runtime and back.

A plan says everything: the runtime keeps no queue and decides nothing. Made by `sched`, read by `runtime`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from deepspan.core.media import PreparedImage
from deepspan.core.output import PromptLogprobs, TokenLogprobs
from deepspan.core.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBlocks:
    """Blocks that have joined a table. first: index in the table of the first of them."""

    first: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens [start, end) of one request. row: its place in the persistent buffers of the runtime.

    begins: set where the row belongs to this request from now on; then `blocks` are its whole tables, otherwise they
    join the tables. token_ids: of the chunk. samples: the chunk reaches the last known token, so the next one is to be
    chosen. num_drafts: how many tokens at the end of the chunk are guesses, to be taken or replaced. wanted_drafts: how
    many tokens to guess behind what is chosen, at most; without `samples`, behind the newest token, which follows the
    chunk.
    """

    request_id: int
    row: int
    start: int
    end: int
    token_ids: Sequence[int]
    samples: bool
    blocks: Mapping[str, NewBlocks]
    begins: "Begin | None" = None
    num_drafts: int = 0
    wanted_drafts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """A request that the runtime does not know, or has forgotten. generated: its tokens after the prompt so far."""

    request: Request
    generated: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderJob:
    """Encode an image and keep the rows under its digest. request_id: whose fault it is if that fails."""

    request_id: int
    image: PreparedImage


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step. encoder_jobs come before the chunks. dropped: digests whose rows are needed no longer."""

    chunks: tuple[Chunk, ...]
    encoder_jobs: tuple[EncoderJob, ...] = ()
    dropped: tuple[str, ...] = ()
    preempted: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(chunk.end - chunk.start for chunk in self.chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """By request id. tokens: chosen by each chunk that samples, one or more. failed: what was not served, and why.

    accepted: how many of a chunk's drafts were taken. invalid: how many its grammar did not allow, none if absent.
    drafts: guesses for the tokens that come next.
    logprobs (one per token), prompt_logprobs: of requests that ask for them.
    """

    tokens: Mapping[int, Sequence[int]]
    failed: Mapping[int, str] = field(default_factory=dict)
    accepted: Mapping[int, int] = field(default_factory=dict)
    invalid: Mapping[int, int] = field(default_factory=dict)
    drafts: Mapping[int, Sequence[int]] = field(default_factory=dict)
    logprobs: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, PromptLogprobs] = field(default_factory=dict)
