"""Runs of queries with host-side bounds of everything they can see: how references walk a batch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryBlock:
    """queries: half-open range in the flat batch, all of one sequence.

    rows: half-open range of the raw rows, num_entries: number of the entries, that any of them can see in its sequence.
    """

    sequence: int
    queries: tuple[int, int]
    rows: tuple[int, int]
    num_entries: int
