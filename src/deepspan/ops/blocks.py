"""Runs of queries with host-side bounds of everything they can see: how references walk a flat batch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryBlock:
    """Half-open flat ranges: queries of one sequence, the raw rows and the compressed entries any of them can see."""

    queries: tuple[int, int]
    rows: tuple[int, int]
    entries: tuple[int, int]
