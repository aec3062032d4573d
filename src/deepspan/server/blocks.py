"""An answer as a row of blocks: reasoning, text, calls, each opened, filled and closed.

The Responses and the Messages form of the API both tell an answer this way. Owns the order: a block is closed before
the next one is opened. Called by `server.responses` and `server.messages`.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Literal

from deepspan.core.output import RequestOutput, TokenEvent
from deepspan.server.answers import CallIds
from deepspan.server.jobs import Job, Service, served

Kind = Literal["reasoning", "text", "call"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """text: of a call, its arguments. name, call_id: of a call. is_complete: whether nothing was cut off."""

    index: int
    kind: Kind
    text: str = ""
    name: str = ""
    call_id: str = ""
    is_complete: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockEvent:
    """what: `open` (block without text), `add` (delta is new), `close` (block with all of its text)."""

    what: Literal["open", "add", "close"]
    block: Block
    delta: str = ""


async def block_events(service: Service, job: Job, *, one_call: bool) -> AsyncGenerator[BlockEvent]:
    """Of a started job with one choice. Raises ApiError if it failed. one_call: drop calls after the first."""
    ids, current = CallIds(), None
    count = 0
    async with aclosing(service.events(job)) as events:
        async for event in events:
            for block, delta in _pieces(event, ids, one_call=one_call):
                if current is None or (current.kind, current.call_id) != (block.kind, block.call_id):
                    if current is not None:
                        yield BlockEvent(what="close", block=current)
                    current, count = replace(block, index=count), count + 1
                    yield BlockEvent(what="open", block=current)
                if delta:
                    current = replace(current, text=current.text + delta)
                    yield BlockEvent(what="add", block=current, delta=delta)
    output = output_of(job)
    if current is not None:
        cut = current.kind == "call" and not all(call.is_complete for call in output.calls)
        yield BlockEvent(what="close", block=replace(current, is_complete=not cut))


def blocks_of(output: RequestOutput, *, one_call: bool) -> list[Block]:
    """The blocks of a finished answer."""
    ids = CallIds()
    blocks: list[Block] = []
    for kind, text in (("reasoning", output.reasoning), ("text", output.text)):
        if text:
            blocks.append(Block(index=len(blocks), kind=kind, text=text))  # type: ignore[arg-type]
    for number, call in enumerate(output.calls[:1] if one_call else output.calls):
        blocks.append(
            Block(
                index=len(blocks),
                kind="call",
                text=call.arguments,
                name=call.name,
                call_id=ids.of(0, number),
                is_complete=call.is_complete,
            )
        )
    return blocks


def output_of(job: Job) -> RequestOutput:
    """Output of a job with one choice that has ended. Raises ApiError if it failed."""
    (output,) = job.outputs
    return served(output)


def _pieces(event: TokenEvent, ids: CallIds, *, one_call: bool) -> list[tuple[Block, str]]:
    pieces: list[tuple[Block, str]] = []
    if event.reasoning:
        pieces.append((Block(index=0, kind="reasoning"), event.reasoning))
    if event.text:
        pieces.append((Block(index=0, kind="text"), event.text))
    for call in event.calls:
        if not (one_call and call.index):
            block = Block(index=0, kind="call", name=call.name or "", call_id=ids.of(0, call.index))
            pieces.append((block, call.arguments))
    return pieces
