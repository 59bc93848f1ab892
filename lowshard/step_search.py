"""Shortest path over placements: from one layout to another on the same ranks, each step priced.

A state is what a layout says beside mesh, shape and dtype. Its neighbours are the states that one collective along
some mesh axes leads to (all_gather, reduce_scatter, all_reduce, all_to_all), one local step (a slice, or one copy of
a replica kept as the only term), or one exact exchange of boxes. Dijkstra's algorithm (Numer. Math. 1, 1959) finds
the cheapest chain, so the price of a chain never exceeds that of its parts.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from heapq import heappop, heappush
from math import prod
from operator import itemgetter
from typing import Literal, NamedTuple

from lowshard import dtypes
from lowshard.bounded import bounded_cache
from lowshard.box import Interval, Split, split_interval
from lowshard.cost import Level
from lowshard.layout import Layout
from lowshard.mesh import DeviceMesh
from lowshard.placement import ReduceOp
from lowshard.step_cost import Prices

StepKind = Literal[
    "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "slice", "keep_one", "exchange"
]

_START, _STOP = itemgetter(0), itemgetter(1)
_SAMPLED_RANKS = 16
_STATES_MOST = 400
_STEP_S = 1e-6
"""What a step must gain, so that of two chains that take the same time the shorter one is taken."""


class State(NamedTuple):
    """A layout on a mesh that everybody knows."""

    sharding_axes: tuple[tuple[int, ...], ...]
    """Mesh axes that cut each dim, outer first."""
    splits: tuple[Split, ...]
    partials: tuple[ReduceOp | None, ...]


class Load(NamedTuple):
    """What an exchange asks of the ranks, estimated from some of them."""

    most: int  # elements received by the rank that receives most
    mean: float  # elements received by a rank, on average
    partners: int  # ranks that it receives from


class Move(NamedTuple):
    """One edge: what it is, along which mesh axes, where it leads, seconds, and elements received by a rank."""

    kind: StepKind
    axes: tuple[int, ...]
    target: State
    seconds: float
    elems: float


def state_of(layout: Layout) -> State:
    """Return a layout's state."""
    return State(layout.sharding_axes, layout.splits, layout.partials)


def folded_axes(src: State, dst: State) -> tuple[int, ...]:
    """Return the axes whose terms are folded on the way."""
    return tuple(
        a for a, (p, q) in enumerate(zip(src.partials, dst.partials, strict=True)) if p is not None and p != q
    )


def fresh_axes(src: State, dst: State) -> tuple[int, ...]:
    """Return the axes that become partial on the way."""
    return tuple(
        a for a, (p, q) in enumerate(zip(src.partials, dst.partials, strict=True)) if q is not None and p != q
    )


def classify(src: State, dst: State) -> tuple[StepKind, tuple[int, ...]]:
    """Return what one step between two states is, and the mesh axes that it runs along."""
    folded, fresh = folded_axes(src, dst), fresh_axes(src, dst)
    gone: list[tuple[int, ...]] = []
    come: list[tuple[int, ...]] = []
    for before, after in zip(src.sharding_axes, dst.sharding_axes, strict=True):
        same = 0
        for a, b in zip(before, after, strict=False):
            if a != b or src.splits[a] != dst.splits[b]:
                break
            same += 1
        if before[same:] and after[same:]:
            return "exchange", ()
        if before[same:]:
            gone.append(before[same:])
        if after[same:]:
            come.append(after[same:])
    left, taken = sum(gone, ()), sum(come, ())
    if folded:
        if gone or fresh:
            return "exchange", ()
        if not taken:
            return "all_reduce", folded
        return ("reduce_scatter", folded) if set(taken) == set(folded) else ("exchange", ())
    if not gone:
        return ("slice", taken) if taken else ("keep_one", fresh)
    if fresh:
        return "exchange", ()
    if not come:
        return "all_gather", left
    if gone == come and len(gone) == 1:
        return "all_to_all", left
    return "exchange", ()


@bounded_cache(1 << 20)
def _parts(extent: int, sizes: tuple[int, ...], splits: tuple[Split, ...]) -> tuple[Interval, ...]:
    """Return the intervals that nested cuts make of a dim, row-major over the axes' coordinates."""
    found: list[Interval] = [(0, extent)]
    for size, split in zip(sizes, splits, strict=True):
        found = [split_interval(whole, size, i, split) for whole in found for i in range(size)]
    return tuple(found)


class Grid:
    """What states are states of: a mesh, an array, and what steps cost.

    Args:
        layout: any layout of the array on the mesh.
        prices: of the steps.
        node_size: ranks a node, or None for one node.
    """

    def __init__(self, layout: Layout, prices: Prices, node_size: int | None) -> None:
        self.mesh: DeviceMesh = layout.mesh
        self.shape, self.itemsize = layout.shape, layout.itemsize_bytes
        self.kind = dtypes.get(layout.dtype).kind
        self.prices, self.node_size = prices, node_size
        size = self.mesh.size
        step = max(1, size // _SAMPLED_RANKS)
        self._coords = [self.mesh.coord(self.mesh.ranks[i]) for i in {*range(0, size, step), size - 1}]
        self._levels: dict[tuple[int, ...], Level] = {}

    def layout(self, state: State, like: Layout) -> Layout:
        """Return the layout of a state."""
        names = [[self.mesh.axis_names[a] for a in axes] for axes in state.sharding_axes]
        return Layout._make(like.mesh, like.shape, like.dtype, names, state.splits, state.partials)

    def group(self, axes: tuple[int, ...]) -> int:
        """Return the ranks along some axes."""
        return prod(self.mesh.shape[a] for a in axes)

    def level(self, axes: tuple[int, ...]) -> Level:
        """Return "network" where ranks along these axes are on several nodes."""
        if not self.node_size or not axes:
            return "node"
        found = self._levels.get(axes)
        if found is None:
            names = [self.mesh.axis_names[a] for a in axes]
            wide = any(len({r // self.node_size for r in group}) > 1 for group in self.mesh.groups(names))
            found = self._levels[axes] = "network" if wide else "node"
        return found

    def largest(self, state: State) -> int:
        """Return the elements of the largest shard: the one at coordinate 0."""
        elems = 1
        for extent, axes in zip(self.shape, state.sharding_axes, strict=True):
            for a in axes:
                extent = -(-extent // self.mesh.shape[a])
            elems *= extent
        return elems

    def load(self, src: State, dst: State) -> Load:
        """Return what one exact exchange between two states asks of the ranks."""
        folded, fresh = folded_axes(src, dst), fresh_axes(src, dst)
        terms = self.group(folded)
        before, after = self._cuts(src), self._cuts(dst)
        most, total, partners = 0, 0, 0
        for coord in self._coords:
            if any(dst.partials[a] != "avg" and coord[a] for a in fresh):
                continue
            wanted, own, cells = 1, 1, 1
            for dim in range(len(self.shape)):
                start, stop = after[dim][_index(coord, dst.sharding_axes[dim], self.mesh.shape)]
                low, high = before[dim][_index(coord, src.sharding_axes[dim], self.mesh.shape)]
                wanted *= stop - start
                own *= max(0, min(stop, high) - max(start, low))
                # Those that begin before the end, but for those that end by the beginning: they lie in order.
                cells *= bisect_left(before[dim], stop, key=_START) - bisect_right(
                    before[dim], start, key=_STOP
                )
            if not wanted:
                continue
            received = terms * wanted - own
            total += received
            most = max(most, received)
            partners = max(partners, terms * cells - (1 if own else 0))
        return Load(most, total / len(self._coords), partners)

    def move(self, src: State, dst: State) -> Move:
        """Return the step from one state to another, priced."""
        kind, axes = classify(src, dst)
        n, level, prices = self.group(axes), self.level(axes), self.prices
        if kind in ("slice", "keep_one"):
            written = 0 if kind == "slice" else self.largest(dst) * self.itemsize
            return Move(kind, axes, dst, prices.local(written), 0.0)
        if kind == "exchange":
            load = self.load(src, dst)
            if load.most == 0:
                return Move("slice", (), dst, prices.local(), 0.0)
            # Ranks that have less to get leave their share of the memory or the network to the others.
            size_bytes = (0.75 * load.most + 0.25 * load.mean) * self.itemsize
            # Of equal prices the one with a name is taken.
            seconds = 1.0001 * prices.exchange(
                load.partners, size_bytes, self.level(tuple(range(self.mesh.ndim)))
            )
            if folded_axes(src, dst):
                whole = self.largest(dst) * self.itemsize
                seconds += max(
                    0.0, prices.seconds("reduce_scatter", 2, whole) - prices.seconds("all_to_all", 2, whole)
                )
            return Move(kind, axes, dst, seconds, load.mean)
        whole = max(self.largest(src), self.largest(dst))
        moved = whole * (n - 1) / n * (2 if kind == "all_reduce" else 1)
        seconds = max(prices.seconds(kind, n, whole * self.itemsize, level), prices.local())
        return Move(kind, axes, dst, seconds, moved)

    def share(self, src: State, dst: State) -> State | None:
        """Return dst with its replicas each holding a share of the box, or None if it cannot be shared.

        The axes that become partial are replicas still: what is folded is spread over them too.
        """
        partials = tuple(q if p == q else None for p, q in zip(src.partials, dst.partials, strict=True))
        cut = {a for axes in dst.sharding_axes for a in axes}
        copies = tuple(
            a for a, op in enumerate(partials) if op is None and a not in cut and self.mesh.shape[a] > 1
        )
        dim = self._widest(dst)
        if not copies or dim is None:
            return None
        return self._cut(State(dst.sharding_axes, dst.splits, partials), copies, dim)

    def share_along(self, state: State, axes: tuple[int, ...]) -> State | None:
        """Return a state whose replicas along some axes each hold a share of the box, or None if it cannot be."""
        dim = self._widest(state)
        return None if dim is None else self._cut(state, axes, dim)

    def _widest(self, state: State) -> int | None:
        """Return the dim that the shards are largest in, or None if none has two elements."""
        extents = []
        for extent, axes in zip(self.shape, state.sharding_axes, strict=True):
            for a in axes:
                extent = -(-extent // self.mesh.shape[a])
            extents.append(extent)
        widest = max(extents, default=0)
        return extents.index(widest) if widest > 1 else None

    def _cuts(self, state: State) -> list[tuple[Interval, ...]]:
        return [
            _parts(
                extent, tuple(self.mesh.shape[a] for a in axes), tuple(state.splits[a] for a in axes)
            )
            for extent, axes in zip(self.shape, state.sharding_axes, strict=True)
        ]  # fmt: skip

    def _cut(
        self, state: State, axes: tuple[int, ...], dim: int, splits: tuple[Split, ...] | None = None
    ) -> State:
        """Return a state with axes that cut a dim further, inside of those that cut it already."""
        sharding_axes = tuple(c + axes if d == dim else c for d, c in enumerate(state.sharding_axes))
        ruled = list(state.splits)
        for a in axes:
            ruled[a] = "balanced" if splits is None else splits[a]
        return State(
            sharding_axes, tuple(ruled), tuple(None if a in axes else p for a, p in enumerate(state.partials))
        )

    # ---- the search

    def cheapest(self, src: State, dst: State, by_bytes: bool) -> list[Move]:
        """Return the moves from one state to another.

        Args:
            src: where to begin.
            dst: where to end.
            by_bytes: the fewest elements received win, then the fewest steps; else the fewest seconds. Few elements
                are all that can be asked for where nothing is known of the cluster.
        """
        if self.folds_together(src, dst):
            value = dst._replace(partials=(None,) * self.mesh.ndim)
            return [*self.cheapest(src, value, by_bytes), self.move(value, dst)]
        most = self.largest(src) + self.largest(dst)
        heap: list[tuple[float, float, float, int, State, list[Move]]] = [(0.0, 0.0, 0.0, 0, src, [])]
        done: set[State] = set()
        serial = 0
        while heap:
            first, second, third, _, state, path = heappop(heap)
            if state == dst:
                return path
            if state in done or len(done) > _STATES_MOST:
                continue
            done.add(state)
            edges = self._bare(state, dst) if by_bytes else self._edges(state, dst)
            for target in edges:
                if target in done or (target != dst and self.largest(target) > most):
                    continue
                move = self.move(state, target)
                if by_bytes:
                    key = (first + move.elems, second + 1, third + move.seconds)
                else:
                    key = (first + move.seconds + _STEP_S, second + move.elems, third + 1)
                serial += 1
                heappush(heap, (*key, serial, target, [*path, move]))
        raise AssertionError("an exchange leads from every state to the last one")

    def _bare(self, state: State, dst: State) -> Iterator[State]:
        """Yield what may come next where bytes decide: the end, or the shares of what is folded."""
        yield dst
        if folded_axes(state, dst) and classify(state, dst)[0] != "all_reduce":
            share = self.share(state, dst)
            if share is not None:
                yield share

    def _edges(self, state: State, dst: State) -> Iterator[State]:
        """Yield the states that one step leads to."""
        yield from self._bare(state, dst)
        home = {a: dim for dim, axes in enumerate(dst.sharding_axes) for a in axes}
        folded = folded_axes(state, dst)
        shared = self._widest(state)
        if folded:
            yield state._replace(
                partials=tuple(None if a in folded else p for a, p in enumerate(state.partials))
            )
        for a in folded[-1:] if len(folded) == 1 or self.folds_apart(state, folded) else ():
            yield state._replace(partials=tuple(None if b == a else p for b, p in enumerate(state.partials)))
            if a in home and self._fits(state, dst, a, home[a]):
                yield self._cut(state, (a,), home[a], dst.splits)
            elif a not in home and shared is not None:
                yield self._cut(state, (a,), shared)
        cut = {a for axes in state.sharding_axes for a in axes}
        for a in home:
            if a not in cut and state.partials[a] is None and self._fits(state, dst, a, home[a]):
                yield self._cut(state, (a,), home[a], dst.splits)
        for dim, axes in enumerate(state.sharding_axes):
            target = dst.sharding_axes[dim]
            for kept in range(len(axes) - 1, -1, -1):
                if axes[: kept + 1] == target[: kept + 1]:
                    break  # those are where they belong
                gone = axes[kept:]
                rest = State(
                    tuple(c[:kept] if d == dim else c for d, c in enumerate(state.sharding_axes)),
                    tuple("balanced" if a in gone else s for a, s in enumerate(state.splits)),
                    state.partials,
                )
                yield rest
                last = gone[0]
                if len(gone) == 1 and home.get(last, dim) != dim and self._fits(rest, dst, last, home[last]):
                    yield self._cut(rest, (last,), home[last], dst.splits)

    def folds_together(self, src: State, dst: State) -> bool:
        """Say whether all partial axes are folded at once, though some of them are partial in dst too.

        A mean of integers is the floor of the exact quotient. Were one axis folded beside an avg axis, each lane
        would be rounded, or wrap, before the last fold. So the value is made first, and dst's partial axes from it.
        """
        if self.kind not in ("int", "uint") or not folded_axes(src, dst):
            return False
        terms = [a for a, op in enumerate(src.partials) if op is not None]
        divides = any(src.partials[a] == "avg" and self.mesh.shape[a] > 1 for a in terms)
        return divides and len(terms) > len(folded_axes(src, dst))

    def folds_apart(self, state: State, folded: tuple[int, ...]) -> bool:
        """Say whether folding axis by axis, the last one first, gives the bits of folding all at once.

        The tree over all terms is a tree of trees where the sizes are powers of two. Whatever is rounded between two
        folds (16-bit floats, averages of integers) is not what is rounded once.
        """
        ops = {state.partials[a] for a in folded}
        if ops <= {"min", "max"}:
            return True
        if self.kind in ("int", "uint", "bool"):
            return "avg" not in ops
        sizes = [self.mesh.shape[a] for a in folded]
        return self.itemsize >= 4 and all(n & (n - 1) == 0 for n in sizes)

    def _fits(self, state: State, dst: State, axis: int, dim: int) -> bool:
        """Say whether an axis is the next one to cut a dim, as dst has it."""
        now = state.sharding_axes[dim]
        return dst.sharding_axes[dim][: len(now) + 1] == (*now, axis)


def _index(coord: tuple[int, ...], axes: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    at = 0
    for a in axes:
        at = at * sizes[a] + coord[a]
    return at
