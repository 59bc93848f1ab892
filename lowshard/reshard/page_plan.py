"""The plan that moves sequences of a paged key-value cache to other ranks and other pages: frozen data."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from lowshard.argument import brief, in_words, instance, items, mapping, whole, wholes
from lowshard.content_hash import text_digest
from lowshard.errors import PlanError
from lowshard.reading import reader
from lowshard.reshard.paged_layout import PagedLayout

SCHEMA: Literal["lowshard-page-plan-1"] = "lowshard-page-plan-1"
_MOST_TOKENS = (1 << 40) - 1


@dataclass(frozen=True, slots=True)
class PagedSequence:
    """One sequence: where its tokens lie on both sides. Token i is in page `i // page_tokens` of the table."""

    name: str
    src_pages: tuple[int, ...]
    dst_pages: tuple[int, ...]
    tokens: int


def tokens_text(sequences: Iterable[PagedSequence]) -> str:
    """Return how many tokens sequences have, as text for a message."""
    return in_words({s.name: f"{s.tokens} tokens" for s in sequences})


@dataclass(frozen=True, slots=True)
class PagePair:
    """Which heads one rank gives another, or keeps."""

    src_rank: int
    dst_rank: int
    heads: tuple[int, int]
    """Of the model, start and stop."""


@dataclass(frozen=True)
class PagePlan:
    """Sequences on their way from one paged cache to another; equal on every rank. `move_pages` runs it.

    Made by `plan_pages`. Everything else follows from these three.
    """

    src: PagedLayout
    dst: PagedLayout
    sequences: tuple[PagedSequence, ...]

    @cached_property
    def pairs(self) -> tuple[PagePair, ...]:
        """Who gives whom which heads: one pair a message. Replicas share the giving."""
        found = []
        for place, rank in enumerate(self.dst.ranks):
            low, high = self.dst.heads_of(rank)
            for part in range(self.src.parts):
                holders = self.src.holders(part)
                start, stop = self.src.heads_of(holders[0])
                heads = max(low, start), min(high, stop)
                if heads[0] < heads[1]:
                    giver = rank if rank in holders else holders[place % len(holders)]
                    found.append(PagePair(giver, rank, heads))
        return tuple(found)

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(s.tokens for s in self.sequences)

    @property
    def world_size(self) -> int:
        """Ranks that a communicator needs."""
        return 1 + max(*self.src.ranks, *self.dst.ranks)

    def pair_bytes(self, pair: PagePair) -> int:
        """Return the bytes that a pair moves of one array."""
        heads = pair.heads[1] - pair.heads[0]
        return self.tokens * heads * self.src.token_elems * self.src.itemsize_bytes

    def sent_bytes(self, rank: int) -> int:
        """Return the bytes of one array that a rank gives others."""
        return sum(self.pair_bytes(p) for p in self.pairs if p.src_rank == rank != p.dst_rank)

    def messages(self, rank: int) -> int:
        """Return how many messages a rank sends: one to each rank that it gives anything."""
        return sum(p.src_rank == rank != p.dst_rank for p in self.pairs) if self.tokens else 0

    def explain(self) -> str:
        """Return in words what moves: a line for each pair of ranks."""
        lines = [f"{self.src}", f"{self.dst}", f"{len(self.sequences)} sequences of {self.tokens} tokens"]
        for pair in self.pairs:
            what = "keeps" if pair.src_rank == pair.dst_rank else f"gives rank {pair.dst_rank}"
            lines.append(
                f"  rank {pair.src_rank} {what} heads {pair.heads[0]} to {pair.heads[1] - 1}: "
                f"{self.pair_bytes(pair)} bytes"
            )
        return "\n".join(lines)

    def digest(self) -> str:
        """Return 32 hex digits of all of it."""
        text = json.dumps(self.to_json(), sort_keys=True)
        return text_digest(text).hex()

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "schema": SCHEMA,
            "src": self.src.to_json(),
            "dst": self.dst.to_json(),
            "sequences": [[s.name, list(s.src_pages), list(s.dst_pages), s.tokens] for s in self.sequences],
        }

    @classmethod
    def from_json(cls, data: object) -> PagePlan:
        """Return the plan that `to_json` wrote, checked as `plan_pages` checks what it is given.

        Raises:
            PlanError, LayoutError, DTypeError: it is not a valid plan.
        """
        return _read(data)


def plan_pages(
    src: PagedLayout,
    dst: PagedLayout,
    sequences: Mapping[str, tuple[Iterable[int], Iterable[int], int]],
) -> PagePlan:
    """Return the plan that moves sequences from one paged cache to another.

    Args:
        src: where they lie.
        dst: where they go: other ranks, numbers of ranks, sizes of pages or orders of dims, of the same heads.
        sequences: by name: the ids of the pages that it fills there, those of the pages that it is to fill here, both
            in the order of its tokens, and how many tokens it has. Sequences may share pages where they begin alike, in
            the source; a page that is written belongs to one.

    Raises:
        PlanError: caches of different models, a page id out of range or used twice, a table that does not fit its
            length; the text names the sequence.
    """
    rule = "sequences are a mapping of names to (pages there, pages here, tokens)"
    rows = []
    for name, given in mapping(sequences, rule, PlanError).items():
        found = items(given, f"{rule}: {brief(name)}", PlanError)
        if len(found) != 3:
            raise PlanError(f"{rule}: {brief(name)} has {brief(found)}")
        rows.append((name, *found))
    return _planned(src, dst, rows)


def _planned(src: PagedLayout, dst: PagedLayout, rows: Sequence[Sequence[Any]]) -> PagePlan:
    for layout in (src, dst):
        instance(layout, PagedLayout, "a plan of pages is between two PagedLayout values", PlanError)
    for what in ("heads", "head_dim", "dtype", "layers"):
        if getattr(src, what) != getattr(dst, what):
            raise PlanError(
                f"pages move between caches of one model: {what} is {getattr(src, what)} there, {getattr(dst, what)} "
                "here"
            )
    if ("k" in src.dims) != ("k" in dst.dims):
        raise PlanError(
            f"keys and values share an array on both sides, or on neither, got dims {src.dims} there, {dst.dims} here"
        )
    made = []
    read: dict[int, tuple[str, tuple[int, ...]]] = {}
    written: dict[int, str] = {}
    for name, src_pages, dst_pages, tokens in rows:
        instance(name, str, "a sequence has a name, which is text", PlanError)
        where = f"sequence {brief(name)}"
        count = whole(tokens, f"{where}: its tokens are a number of 0 or more", PlanError, 0, _MOST_TOKENS)
        there = _table(src, src_pages, count, f"{where}: source")
        here = _table(dst, dst_pages, count, f"{where}: destination")
        for place, page in enumerate(there):
            other, before = read.setdefault(page, (name, there[:place]))
            if before != there[:place]:
                raise PlanError(
                    f"{where}: source page {page} is of sequence {brief(other)} too, but the pages before it differ: "
                    "sequences may share the pages that they begin with, and no others"
                )
        for page in here:
            other = written.setdefault(page, name)
            if other != name:
                raise PlanError(f"{where}: destination page {page} is of sequence {brief(other)} too")
        made.append(PagedSequence(name, there, here, count))
    if len({s.name for s in made}) != len(made):
        raise PlanError("a sequence stands once in a plan, got one name twice")
    return PagePlan(src, dst, tuple(made))


def _table(layout: PagedLayout, pages: Any, tokens: int, where: str) -> tuple[int, ...]:
    rule = f"{where}: pages are ids from 0 to {layout.pages - 1}"
    found = wholes(pages, rule, PlanError, 0, layout.pages - 1)
    needed = -(-tokens // layout.page_tokens)
    if len(found) != needed:
        raise PlanError(
            f"{where}: {tokens} tokens fill {needed} pages of {layout.page_tokens}, got {len(found)} pages"
        )
    if len(set(found)) != len(found):
        twice = next(page for page in found if found.count(page) > 1)
        raise PlanError(f"{where}: a page stands once in a table, {twice} stands twice")
    return found


@reader("plan of pages", PlanError)
def _read(
    schema: Literal["lowshard-page-plan-1"],
    src: PagedLayout,
    dst: PagedLayout,
    sequences: tuple[tuple[str, tuple[int, ...], tuple[int, ...], int], ...],
) -> PagePlan:
    return _planned(src, dst, sequences)
