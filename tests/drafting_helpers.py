"""Drafting under control: a drafter whose guesses stand up to a chosen count, and caches read as positions.

`Scripted` lets the real stages work (their slots are written, their context is kept) and replaces what they guessed.
`cache_rows` reads everything that a request's next token may depend on out of the blocks of its own tables.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from engine_helpers import Service

from deepspan.kv.families import DRAFT, Family
from deepspan.runtime.choosing import Drafts
from deepspan.runtime.drafting import Anchor

Script = Callable[[Anchor], int]  # how many guesses of an anchor stand; below 0: nothing is guessed


class Scripted:
    """Takes the place of `Drafting.propose`. truth: what a request generates, by the bytes of its prompt.

    depths: of the blocks proposed so far, by prompt: (position of the anchor, guesses that stand, guesses).
    """

    def __init__(self, service: Service, truth: Mapping[bytes, Sequence[int]], script: Script) -> None:
        assert service.runner._drafting is not None, "a scripted drafter stands in front of a real one"
        self._real, self._truth, self._script = service.runner._drafting.propose, truth, script
        self.depths: dict[bytes, list[tuple[int, int, int]]] = {}
        service.runner._drafting.propose = self.propose

    def propose(self, anchors: Sequence[Anchor]) -> list[Drafts]:
        self._real(anchors)
        return [self._guess(one) for one in anchors]

    def _guess(self, anchor: Anchor) -> Drafts:
        key, known = anchor.row.request.token_ids.tobytes(), anchor.row.generated
        truth = list(self._truth[key])
        assert known == truth[: len(known)], "what was generated is not what was expected"
        right = min(self._script(anchor), anchor.count)
        if right < 0:
            return Drafts()
        tokens = truth[len(known) : len(known) + anchor.count]
        for index in range(right, len(tokens)):
            tokens[index] = (tokens[index] + 1 + index) % len(anchor.row.forbidden)
        self.depths.setdefault(key, []).append((anchor.position, right, len(tokens)))
        return Drafts(tokens=tuple(tokens), log_q=(None,) * len(tokens))


def cycling(num_drafts: int) -> Script:
    """Every count from none to all in turn, for each request by itself and from elsewhere."""
    calls: dict[int, int] = {}

    def script(anchor: Anchor) -> int:
        key = id(anchor.row)
        calls[key] = calls.get(key, len(calls)) + 1
        return calls[key] % (num_drafts + 1)

    return script


def cache_rows(service: Service, request_id: int) -> dict[str, torch.Tensor]:
    """What the computation of the next token may read of a request: rows by position, of every family and layer."""
    cache = service.scheduler._cache
    count, tables = service.scheduler.sequence(request_id).num_computed, cache.tables(request_id)
    found = {}
    for family in cache.families:
        table = torch.tensor(tables[family.name])
        for name, tensor in tensors_of(service, family):
            numbers = valid_rows(family, count)
            found[name] = tensor[table[numbers // rows_per_block(family)], row_in_block(family, numbers)].clone()
    return found


def spoil_rows(service: Service, request_id: int) -> None:
    """Overwrite whatever the caches hold of positions that were taken back: reading one shows in the answer."""
    cache = service.scheduler._cache
    count, tables = service.scheduler.sequence(request_id).num_computed, cache.tables(request_id)
    for family in cache.families:
        table = torch.tensor(tables[family.name])
        per_block = rows_per_block(family)
        first = count // family.ratio if family.kind == "rows" else count
        # A state keeps few rows of a block: those behind what counts must not be mistaken for it.
        most = min(len(table) * per_block, first + (service.config.num_drafts if family.kind == "state" else 10**9))
        numbers = torch.arange(first, most)
        kept = set(zip(*_places(family, table, valid_rows(family, count)), strict=True))
        block, row = _places(family, table, numbers)
        free = [i for i, place in enumerate(zip(block, row, strict=True)) if place not in kept]
        for _, tensor in tensors_of(service, family):
            tensor[np.asarray(block, dtype=int)[free], np.asarray(row, dtype=int)[free]] = torch.nan


def _places(family: Family, table: torch.Tensor, numbers: torch.Tensor) -> tuple[list[int], list[int]]:
    return table[numbers // rows_per_block(family)].tolist(), row_in_block(family, numbers).tolist()


def valid_rows(family: Family, count: int) -> torch.Tensor:
    """Numbers of the rows, positions or entries, that are there for a sequence of `count` computed tokens."""
    if family.kind == "rows":
        return torch.arange(count // family.ratio)
    return torch.arange(family.first_needed(count), count)


def rows_per_block(family: Family) -> int:
    """Numbers that one block stands for: tokens, or entries of them."""
    return family.block_tokens // family.ratio if family.kind == "rows" else family.block_tokens


def row_in_block(family: Family, numbers: torch.Tensor) -> torch.Tensor:
    inside = numbers % rows_per_block(family)
    return inside % family.block_rows if family.kind == "state" else inside


def tensors_of(service: Service, family: Family) -> list[tuple[str, torch.Tensor]]:
    """Cache tensors of a family with a name for each."""
    caches = service.runner._caches
    if family.name == DRAFT:
        return [(f"draft of stage {index}", layer.window) for index, layer in enumerate(caches.draft_layers)]
    fields = {"window": ("window",), "rows": ("entries",), "state": ("state", "index_state")}[family.kind]
    if family.name.startswith("index"):
        fields = ("index",)
    found = [
        (f"{name} of layer {layer}", getattr(caches.layers[layer], name)) for layer in family.layers for name in fields
    ]
    return [(name, tensor) for name, tensor in found if tensor is not None]
