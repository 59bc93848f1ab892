"""One rank's side of an exchange, computed once: which boxes it receives, and what it packs for others.

An exchange can run in rounds, each a slab of every box, so that packed data stays small. Peers, whose memory this rank
can read, and other ranks are treated separately.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from math import prod
from typing import Any, NamedTuple

import numpy as np

from lowshard.bounded import BoundedCache
from lowshard.box import Box, relative_slices, shape_of, single_run, split_interval, volume
from lowshard.exchange import Exchange, Piece
from lowshard.placement import ReduceOp
from lowshard.redistribute_plan import RedistributePlan, Step
from lowshard.transfer.cross_constants import LONG_BYTES
from lowshard.transfer.spans import Span, box_span, is_worth_it

Index = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """The source of a box of the result."""

    rank: int
    index: Index  # slices that take it out of that rank's array
    start: int  # its first element in that rank's stage in this round; -1 if it is no peer
    got: int  # its first element in the receive buffer of this round; -1 if it is not received


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of the result and its sources: one, or one for each term, in the order of the fold."""

    index: Index
    shape: tuple[int, ...]
    sources: tuple[Source, ...]

    @property
    def elems(self) -> int:
        """Elements of the box."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class StagedBox:
    """A box that a rank packs for others: its slices of the array, and its position in the packed buffer."""

    index: Index
    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        """One past its last element in the packed buffer."""
        return self.start + prod(self.shape)


class Stage(NamedTuple):
    """All that one rank packs in a round, first what its peers read; a box that several need is packed once."""

    laid: tuple[StagedBox, ...]
    elems: int
    starts: dict[Box, int]


class Wire(NamedTuple):
    """Counts and displacements of one side of an all_to_all_v, in elements by peer."""

    counts: list[int]
    displs: list[int]
    elems: int


class Round(NamedTuple):
    """One rank's part in one round."""

    chunks: tuple[Chunk, ...]
    stage: Stage
    sends: Wire
    """Messages sent, out of the stage."""
    receives: Wire


SENT, STAGED, IN_PLACE = "sent", "staged", "in place"
"""How a rank provides its array: in messages; in a stage that peers read; or in place. Other ranks get messages."""


@dataclass(frozen=True)
class Program:
    """One rank's side of one exchange."""

    name: str  # for statistics and errors
    exchange: Exchange
    rank: int
    size: int
    shape: tuple[int, ...] | None  # of the result; None outside the destination mesh
    dtype: np.dtype[Any]
    op: ReduceOp | None
    divisor: int  # of a folded sum
    fill_op: ReduceOp | None  # the op whose identity fills this rank's result, or None
    moves: bool  # whether any rank moves a byte; if not, nobody communicates
    sent_bytes: int
    received_bytes: int
    largest_bytes: int  # of the largest array or, where terms are folded, of all that is folded on a rank
    near: frozenset[int]  # the ranks whose memory this one reaches, itself among them
    shares_nodes: bool  # whether any rank reaches another's memory; the same on all ranks
    leaves_nodes: bool  # whether any rank needs a byte of one that it does not reach; the same on all ranks
    serial: int = field(default_factory=count().__next__)
    """A unique number."""
    _rounds: dict[tuple[int, int, str], Round] = field(default_factory=dict, repr=False)
    kept: dict[Any, Any] = field(default_factory=dict, repr=False)
    """Cache of `lowshard.execute`."""

    def round(self, number: int, of: int, way: str) -> Round:
        """Return one of several rounds."""
        found = self._rounds.get((number, of, way))
        if found is None:
            found = self._rounds[number, of, way] = _round(self, number, of, way)
        return found

    @cached_property
    def text(self) -> str:
        """Description in errors and in the record of calls."""
        return f"{self.name} {self.exchange.src} -> {self.exchange.dst}"

    @cached_property
    def _near_pieces(self) -> tuple[Piece, ...]:
        rank = self.rank
        return tuple(
            p for p in self.exchange.outgoing(rank) if p.dst_rank != rank and p.dst_rank in self.near
        )

    @property
    def sends_near(self) -> bool:
        """Whether a peer reads anything of this rank."""
        return bool(self._near_pieces)

    @cached_property
    def is_worth_reading(self) -> bool:
        """Whether peers should read this rank's private memory by system calls."""
        exchange, item = self.exchange, self.dtype.itemsize
        own = exchange.src.box(self.rank) if self.sends_near else ()
        return self.op is None and all(
            single_run(tuple((s.start, s.stop) for s in relative_slices(p.box, own)), shape_of(own))
            is not None
            and is_worth_it(
                _span(p.box, own, item), _span(p.box, exchange.dst.box(p.dst_rank), item), LONG_BYTES
            )
            for p in self._near_pieces
        )

    @cached_property
    def near_shapes(self) -> dict[int, tuple[int, ...]]:
        """The shape of each peer's array that this rank reads."""
        found = {piece.src_rank for piece in self.exchange.incoming(self.rank)}
        return {rank: self.exchange.src.local_shape(rank) for rank in found & self.near}

    @cached_property
    def reached_bytes(self) -> int:
        """Bytes that this rank reads from its peers."""
        rank, near = self.rank, self.near
        taken = (p.elems for p in self.exchange.incoming(rank) if p.src_rank != rank and p.src_rank in near)
        return sum(taken) * self.dtype.itemsize

    @property
    def view(self) -> Index | None:
        """The slices of this rank's array that are its result, if nothing is moved or computed."""
        if self.moves or self.op is not None or self.fill_op is not None or self.shape is None:
            return None
        chunks = self.round(0, 1, SENT).chunks
        return chunks[0].sources[0].index if len(chunks) == 1 else None


@dataclass(frozen=True)
class StepProgram:
    """One rank's side of a step."""

    step: Step
    parts: tuple[Program, ...]  # of its exchanges, in order
    native: str = ""  # the collective over the whole communicator that does it, or ""
    counts: tuple[list[int], list[int]] = field(default=([], []))
    whole: Program | None = None
    """A reduction of two terms as one exchange: each rank folds its whole result, moving as many bytes in one pass."""

    @property
    def kept_bytes(self) -> int:
        """Approximate memory of this, with its rounds."""
        parts = self.parts if self.whole is None else (*self.parts, self.whole)
        # The rounds repeat the pieces as slices, and as displacements for the kernels.
        return sum(_OWN_BYTES + 2 * part.exchange.kept_bytes for part in parts)


class Form(NamedTuple):
    """Shapes (None outside the mesh) and dtype of a rank's arrays."""

    local: tuple[int, ...] | None
    out: tuple[int, ...] | None
    dtype: np.dtype[Any]


_OWN_BYTES, _FORM_BYTES = 1 << 10, 512
_FORMS = BoundedCache[tuple[bytes, int], Form](
    "forms of arrays in redistributions", 1 << 20, lambda key, form: _FORM_BYTES
)


def form_of(plan: RedistributePlan, rank: int) -> Form:
    """Return the form of a rank's arrays of a plan; cached."""
    key = (plan.digest_bytes, rank)
    found = _FORMS.get(key)
    if found is None:
        src, dst = plan.src, plan.dst
        found = Form(
            src.local_shape(rank) if rank in src.mesh else None,
            dst.local_shape(rank) if rank in dst.mesh else None,
            src.numpy_dtype,
        )
        _FORMS.put(key, found)
    return found


_PROGRAMS = BoundedCache[tuple[bytes, int, tuple[int, ...]], tuple[StepProgram, ...]](
    "programs of redistributions", 16 << 20, lambda key, found: sum(step.kept_bytes for step in found)
)


def programs(plan: RedistributePlan, rank: int, homes: tuple[int, ...]) -> tuple[StepProgram, ...]:
    """Return a rank's programs for the steps of a plan; cached."""
    key = (plan.digest_bytes, rank, homes)
    found = _PROGRAMS.get(key)
    if found is None:
        found = tuple(_step_program(step, rank, homes) for step in plan.steps)
        _PROGRAMS.put(key, found)
    return found


def _step_program(step: Step, rank: int, homes: tuple[int, ...]) -> StepProgram:
    kinds = [step.kind] if len(step.exchanges) == 1 else ["reduce_scatter", "all_gather"]
    parts = tuple(
        _program("all_to_all_v" if kind == "exchange" else kind, part, rank, homes)
        for kind, part in zip(kinds, step.exchanges, strict=True)
    )
    whole = None
    if len(step.exchanges) == 2 and step.exchanges[0].terms == 2:
        first, last = step.exchanges
        direct = Exchange(first.src, last.dst, first.folded, last.fresh, first.node_size)
        whole = _program("all_reduce", direct, rank, homes)
    return StepProgram(step, parts, *_native(step, len(homes)), whole)


def _program(name: str, exchange: Exchange, rank: int, homes: tuple[int, ...]) -> Program:
    item = exchange.src.itemsize_bytes
    dst_box = exchange.dst.box(rank) if rank in exchange.dst.mesh else None
    # The first shard is the largest; the same number on all ranks.
    largest = max(
        exchange.src.local_elems(exchange.src.mesh.ranks[0]),
        exchange.dst.local_elems(exchange.dst.mesh.ranks[0]) * exchange.terms,
    )
    near = frozenset(r for r, home in enumerate(homes) if home == homes[rank])
    return Program(
        name, exchange, rank, len(homes),
        shape=None if dst_box is None else shape_of(dst_box),
        dtype=exchange.dst.numpy_dtype,
        op=exchange.op,
        divisor=exchange.divisor,
        fill_op=None if dst_box is None else exchange.fill_op(rank),
        moves=exchange.moves_bytes(),
        sent_bytes=exchange.sent_bytes(rank),
        received_bytes=exchange.received_bytes(rank),
        largest_bytes=largest * item,
        near=near,
        shares_nodes=len(set(homes)) < len(homes),
        leaves_nodes=len(near) < len(homes) and _leaves_nodes(exchange, homes),
    )  # fmt: skip


def _leaves_nodes(exchange: Exchange, homes: tuple[int, ...]) -> bool:
    ranks = exchange.dst.mesh.ranks
    return any(homes[p.src_rank] != homes[rank] for rank in ranks for p in exchange.incoming(rank))


def _native(step: Step, size: int) -> tuple[str, tuple[list[int], list[int]]]:
    """Return the communicator's own collective for a step, if all of its ranks take part in their order."""
    nothing: tuple[list[int], list[int]] = ([], [])
    src, dst = step.src, step.dst
    if not step.axes or not step.moves_bytes() or dst.mesh.groups(step.axes) != [tuple(range(size))]:
        return "", nothing
    if step.kind == "all_gather":
        whole = shape_of(dst.box(0))
        runs = [single_run(src.box(r), whole) for r in range(size)]
        counts = [src.local_elems(r) for r in range(size)]
        if any(run is None for run in runs):
            return "", nothing
        displs = [run or 0 for run in runs]
        even = counts == counts[:1] * size and displs == [i * counts[0] for i in range(size)]
        return ("all_gather" if even else "all_gather_v"), (counts, displs)
    if step.kind not in ("reduce_scatter", "all_reduce") or (step.kind == "all_reduce") != (
        len(step.exchanges) == 2
    ):
        return "", nothing
    first = step.exchanges[0]
    if first.divisor not in (1, size):  # sums and averages mixed
        return "", nothing
    shares = [first.dst.box(r) for r in range(size)]
    if len({volume(box) for box in shares}) > 1:
        return "", nothing
    if step.kind == "reduce_scatter":
        whole = shape_of(src.box(0))
        if [single_run(box, whole) for box in shares] != [i * volume(shares[0]) for i in range(size)]:
            return "", nothing
    return step.kind, nothing


def slab(box: Box, number: int, of: int) -> Box:
    """Return one of several slabs of a box, split along its first dim that is long enough, else its longest one."""
    if of == 1:
        return box
    extents = shape_of(box)
    dim = next((d for d, n in enumerate(extents) if n >= of), None)
    if dim is None:
        if not extents:
            return box if number == 0 else ((0, 0),)
        dim = extents.index(max(extents))
    return (*box[:dim], split_interval(box[dim], of, number), *box[dim + 1 :])


def _round(program: Program, number: int, of: int, way: str) -> Round:
    exchange, rank, size = program.exchange, program.rank, program.size
    near = frozenset((rank,)) if way == SENT else program.near
    incoming, stages = exchange.incoming(rank), {}
    taken = [0] * size, [0] * size
    got: dict[tuple[int, int], int] = {}
    at = 0
    # Received boxes lie by source rank, as all_to_all_v brings them.
    for piece in sorted((p for p in incoming if p.src_rank not in near), key=lambda p: p.src_rank):
        elems = volume(slab(piece.box, number, of))
        taken[0][piece.src_rank], taken[1][piece.src_rank] = elems, at
        got[piece.src_rank, piece.term] = at
        at += elems
    by_box: dict[Box, list[Piece]] = {}
    for piece in incoming:
        by_box.setdefault(piece.box, []).append(piece)
        source = piece.src_rank
        if source != rank and source in near and source not in stages:
            stages[source] = stage_of(exchange, source, number, of, near)
    chunks = []
    for box, pieces in by_box.items():
        part = slab(box, number, of)
        if volume(part) == 0:
            continue
        sources = []
        for piece in sorted(pieces, key=lambda p: p.term):
            index = relative_slices(part, exchange.src.box(piece.src_rank))
            start = stages[piece.src_rank].starts[part] if piece.src_rank in stages else -1
            sources.append(Source(piece.src_rank, index, start, got.get((piece.src_rank, piece.term), -1)))
        chunks.append(Chunk(relative_slices(part, exchange.dst.box(rank)), shape_of(part), tuple(sources)))
    stage = stage_of(exchange, rank, number, of, near, way != IN_PLACE)
    given = [0] * size, [0] * size
    for piece in exchange.outgoing(rank):
        part = slab(piece.box, number, of)
        if piece.dst_rank not in near and volume(part):
            given[0][piece.dst_rank], given[1][piece.dst_rank] = volume(part), stage.starts[part]
    return Round(tuple(chunks), stage, Wire(*given, stage.elems), Wire(*taken, at))


def stage_of(
    exchange: Exchange, rank: int, number: int, of: int, near: frozenset[int], lays_near: bool = True
) -> Stage:
    """Return what a rank packs in a round: for its peers, unless they read its array, then for others."""
    if rank not in exchange.src.mesh:
        return Stage((), 0, {})
    own = exchange.src.box(rank)
    laid: list[StagedBox] = []
    starts: dict[Box, int] = {}
    at = 0
    for piece in sorted(exchange.outgoing(rank), key=lambda p: p.dst_rank not in near):
        part = slab(piece.box, number, of)
        if piece.dst_rank == rank or part in starts or volume(part) == 0:
            continue
        if not lays_near and piece.dst_rank in near:
            continue
        starts[part] = at
        laid.append(StagedBox(relative_slices(part, own), shape_of(part), at))
        at += volume(part)
    return Stage(tuple(laid), at, starts)


def _span(box: Box, within: Box, item: int) -> Span:
    return box_span(relative_slices(box, within), shape_of(within), item)
