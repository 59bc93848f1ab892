"""Plans that take one layout of an array to another: frozen data, no arrays, no communicator.

A plan is a chain of steps (`lowshard.step_search` finds it). Each step is one exact exchange of boxes, or two for a
reduction to replicas: each replica folds its share, then the shares are gathered. What is priced is what is executed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, zip_longest
from typing import Any

from lowshard.argument import whole
from lowshard.bounded import BoundedCache
from lowshard.content_hash import text_digest
from lowshard.cost import ClusterProfile, time_text
from lowshard.errors import PlanError
from lowshard.exchange import Exchange, Piece, on_one_grid, partial_axes
from lowshard.layout import Layout
from lowshard.reading import reader
from lowshard.step_cost import prices_of
from lowshard.step_search import Grid, Move, State, StepKind, folded_axes, fresh_axes, state_of

__all__ = [
    "Exchange", "Piece", "RedistributePlan", "Step", "plan_redistribute", "predict_redistribute",
]  # fmt: skip

_RANK = "a rank is an integer"


@dataclass(frozen=True)
class Step:
    """One step of a plan.

    Attributes:
        kind: all_gather, reduce_scatter, all_reduce and all_to_all along `axes`; slice and keep_one move nothing;
            exchange is any other map of boxes.
        axes: names of the mesh axes that it runs along; () where all ranks take part.
        exchanges: the box maps; two for a reduction to replicas whose shares are gathered.
        predicted_s: seconds by the profile that the plan was made with.
    """

    kind: StepKind
    axes: tuple[str, ...]
    exchanges: tuple[Exchange, ...]
    predicted_s: float = field(default=0.0, compare=False)

    @property
    def src(self) -> Layout:
        """The layout before."""
        return self.exchanges[0].src

    @property
    def dst(self) -> Layout:
        """The layout after."""
        return self.exchanges[-1].dst

    @property
    def folded(self) -> tuple[int, ...]:
        """Positions of the mesh axes whose terms are folded."""
        return self.exchanges[0].folded

    @property
    def fresh(self) -> tuple[int, ...]:
        """Positions of the mesh axes that become partial."""
        return self.exchanges[-1].fresh

    def sent_bytes(self, rank: int) -> int:
        """Return the bytes a rank sends to others."""
        return sum(part.sent_bytes(rank) for part in self.exchanges)

    def received_bytes(self, rank: int) -> int:
        """Return the bytes a rank receives from others."""
        return sum(part.received_bytes(rank) for part in self.exchanges)

    def moves_bytes(self) -> bool:
        """Return True when any rank receives anything from another."""
        return any(part.moves_bytes() for part in self.exchanges)

    def to_json(self) -> dict[str, Any]:
        """Return plain data that `from_json` reads back."""
        return {
            "kind": self.kind,
            "axes": list(self.axes),
            "exchanges": [part.to_json() for part in self.exchanges],
            "predicted_s": self.predicted_s,
        }

    def __str__(self) -> str:
        along = f" along {', '.join(self.axes)}" if self.axes else ""
        first = self.exchanges[0]
        fold = f", {first.op} of {first.terms} terms in tree order" if first.folded else ""
        return f"{self.kind}{along}: {self.src} -> {self.dst}{fold}"


@dataclass(frozen=True)
class RedistributePlan:
    """The steps from `src` to `dst`; equal on every rank. `lowshard.execute` runs it."""

    src: Layout
    dst: Layout
    steps: tuple[Step, ...]
    is_default: bool = field(default=False, compare=False)
    """The predicted seconds are those of the built-in profile: nothing was measured."""
    _measured: list[float] = field(default_factory=list, repr=False, compare=False)

    @property
    def kept_bytes(self) -> int:
        """About how many bytes of memory this takes, with what it has found out for the ranks that were asked for."""
        return _OWN_BYTES + sum(part.kept_bytes for step in self.steps for part in step.exchanges)

    @cached_property
    def world_size(self) -> int:
        """The smallest communicator that holds every rank of both meshes."""
        return max(self.src.mesh.world_size, self.dst.mesh.world_size)

    @property
    def predicted_s(self) -> float:
        """Seconds of all steps by the profile that the plan was made with."""
        return sum(step.predicted_s for step in self.steps)

    @property
    def measured_s(self) -> tuple[float, ...]:
        """Seconds of each step on its slowest rank, from the last `execute(..., profile=True)` here; () before one."""
        return tuple(self._measured)

    def note_measured(self, seconds: list[float]) -> None:
        """Keep what the steps took, to be shown beside the prediction."""
        self._measured[:] = seconds

    def sent_bytes(self, rank: int) -> int:
        """Return the bytes a rank sends to others over all steps; 0 for a rank that takes no part.

        Raises:
            PlanError: the rank is not an integer.
        """
        rank = whole(rank, _RANK, PlanError)
        return sum(step.sent_bytes(rank) for step in self.steps)

    def received_bytes(self, rank: int) -> int:
        """Return the bytes a rank receives from others over all steps; 0 for a rank that takes no part.

        Raises:
            PlanError: the rank is not an integer.
        """
        rank = whole(rank, _RANK, PlanError)
        return sum(step.received_bytes(rank) for step in self.steps)

    def explain(self) -> str:
        """Return the plan as text: each step with its bytes, predicted and measured seconds, and each rank's bytes."""
        lines = [f"from  {self.src}", f"to    {self.dst}"]
        if not self.steps:
            lines.append("      nothing to do: every rank already holds its result")
        ranks = range(self.world_size)
        for number, step in enumerate(self.steps, 1):
            most = max(max(step.sent_bytes(r), step.received_bytes(r)) for r in ranks)
            took = f", measured {time_text(self._measured[number - 1])}" if self._measured else ""
            guess = " (no profile)" if self.is_default else ""
            lines.append(f"step {number}: {step}")
            lines.append(
                f"        at most {most:,} bytes a rank, predicted {time_text(step.predicted_s)}{guess}{took}"
            )
        if len(self.steps) > 1:
            took = f", measured {time_text(sum(self._measured))}" if self._measured else ""
            lines.append(f"all steps: predicted {time_text(self.predicted_s)}{took}")
        sent, received = [self.sent_bytes(r) for r in ranks], [self.received_bytes(r) for r in ranks]
        lines.append(f"moves {sum(sent):,} bytes in all")
        shown = list(ranks)[:16]
        lines.extend(f"  rank {r}: sends {sent[r]:,}, receives {received[r]:,}" for r in shown)
        if len(shown) < self.world_size:
            lines.append(
                f"  ... {self.world_size - len(shown)} more ranks, at most {max(received):,} received"
            )
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return plain data that `from_json` reads back."""
        return {
            "src": self.src.to_json(),
            "dst": self.dst.to_json(),
            "steps": [step.to_json() for step in self.steps],
            "is_default": self.is_default,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RedistributePlan:
        """Return the plan that `to_json` wrote, verified: its steps are such as a planner makes from src to dst.

        Raises:
            PlanError: a field is missing or does not fit, or the steps do not lead from src to dst.
        """
        return _read(data)

    def digest(self) -> str:
        """Return 32 hex digits that two plans share exactly when they are equal."""
        return self.digest_bytes.hex()

    @cached_property
    def digest_bytes(self) -> bytes:
        """The digest as 16 bytes."""
        steps = [{**step.to_json(), "predicted_s": None} for step in self.steps]
        text = json.dumps(
            [self.src.to_json(), self.dst.to_json(), steps], sort_keys=True, separators=(",", ":")
        )
        return text_digest(text)

    def __str__(self) -> str:
        return self.explain()


_OWN_BYTES = 1 << 10
_PLANS = BoundedCache[tuple[str, str, int | None, int], RedistributePlan](
    "redistribution plans", 8 << 20, lambda key, plan: plan.kept_bytes
)


def plan_redistribute(
    src: Layout, dst: Layout, cost: ClusterProfile | None = None, node_size: int | None = None
) -> RedistributePlan:
    """Return the plan that moves an array from layout `src` to layout `dst`.

    Pure: every process gets the same plan from the same arguments. Plans are cached.

    A mean of integers is the floor of the exact quotient of all terms. So the partial axes of integers of which one is
    an avg axis are folded together: where some of them stay partial, they hold terms of the value afterwards.

    Meshes of the same sizes over the same ranks are one grid, whatever their axes are called: what is partial along an
    axis of src and along the axis of dst in its place, by the same op, stays so.

    Args:
        src: what the ranks hold; any placements, any mesh.
        dst: what they shall hold; the same global shape and dtype, on any mesh.
        cost: a cluster's cost profile: the plan takes the fewest seconds by it. Without one the plan moves the
            fewest bytes.
        node_size: ranks a node (rank r is on node r // node_size): copies on the own node are
            preferred as sources, and steps across nodes are priced as such.

    Raises:
        PlanError: global shapes or dtypes differ, node_size is below 1, or src, dst or cost is of another type.
    """
    for name, layout in (("src", src), ("dst", dst)):
        if not isinstance(layout, Layout):
            raise PlanError(f"{name} is a Layout, got {type(layout).__name__}")
    if node_size is not None:
        node_size = whole(node_size, "node_size is a number of ranks >= 1", PlanError, 1)
    serial = 0 if cost is None else _serial_of(cost)
    key = (src.digest(), dst.digest(), node_size, serial)
    plan = _PLANS.get(key)
    if plan is None:
        plan = _PLANS.put(key, _plan(src, dst, cost, node_size))
    return plan


def predict_redistribute(
    src: Layout, dst: Layout, cost: ClusterProfile | None = None, node_size: int | None = None
) -> float:
    """Return the seconds that `plan_redistribute` predicts; made to be asked thousands of times.

    No array and no box map is made; answers are kept with the plans. Without a profile the built-in default's times
    are given, of the plan that moves the fewest bytes.

    Raises:
        PlanError: as for `plan_redistribute`.
    """
    return plan_redistribute(src, dst, cost, node_size).predicted_s


def _serial_of(cost: object) -> int:
    if not isinstance(cost, ClusterProfile):
        raise PlanError(
            f"cost is a ClusterProfile (ClusterProfile.load(path)) or None, got {type(cost).__name__}"
        )
    return prices_of(cost).serial


def _plan(src: Layout, dst: Layout, cost: ClusterProfile | None, node_size: int | None) -> RedistributePlan:
    if src.shape != dst.shape or src.dtype != dst.dtype:
        raise PlanError(
            f"source and destination are layouts of one array: {src.dtype}{list(src.shape)} is not "
            f"{dst.dtype}{list(dst.shape)}; reshape or cast is a separate step"
        )
    prices = prices_of(cost)
    grid = Grid(dst, prices, node_size)
    if not on_one_grid(src, dst):
        steps = _across(src, dst, grid, node_size)
    elif state_of(src) == state_of(dst):
        steps = ()
    else:
        moves = grid.cheapest(state_of(src), state_of(dst), cost is None)
        steps = _along(src, dst, moves, grid, node_size)
    return RedistributePlan(src, dst, steps, prices.profile.is_default)


def _along(
    src: Layout, dst: Layout, moves: list[Move], grid: Grid, node_size: int | None
) -> tuple[Step, ...]:
    """Return the steps of a path on one grid of ranks."""
    steps = []
    here = src
    for number, move in enumerate(moves, 1):
        there = dst if number == len(moves) else grid.layout(move.target, dst)
        steps.append(_step(here, there, move, grid, node_size))
        here = there
    return tuple(steps)


def _step(here: Layout, there: Layout, move: Move, grid: Grid, node_size: int | None) -> Step:
    """Return the step of a move on one grid of ranks."""
    folded, fresh = folded_axes(state_of(here), move.target), fresh_axes(state_of(here), move.target)
    parts: tuple[Exchange, ...] = (Exchange(here, there, folded, fresh, node_size),)
    if move.kind == "all_reduce":
        shared = grid.share_along(move.target, folded)
        if shared is not None:
            share = grid.layout(shared, there)
            parts = (
                Exchange(here, share, folded, (), node_size),
                Exchange(share, there, (), fresh, node_size),
            )
    return Step(move.kind, tuple(there.mesh.axis_names[a] for a in move.axes), parts, move.seconds)


def _across(src: Layout, dst: Layout, grid: Grid, node_size: int | None) -> tuple[Step, ...]:
    """Return the steps between two meshes: all terms are folded; what is folded to replicas goes by way of shares."""
    folded, fresh = partial_axes(src), partial_axes(dst)
    plain = State(dst.sharding_axes, dst.splits, (None,) * dst.mesh.ndim)
    shared = grid.share(plain, state_of(dst)) if folded else None
    if shared is None:
        return (_cross(Exchange(src, dst, folded, fresh, node_size), grid),)
    share = grid.layout(shared, dst)
    first = Exchange(src, share, folded, (), node_size)
    last = grid.move(shared, state_of(dst))
    names = tuple(dst.mesh.axis_names[a] for a in last.axes)
    return (
        _cross(first, grid),
        Step(last.kind, names, (Exchange(share, dst, (), fresh, node_size),), last.seconds),
    )


def _cross(exchange: Exchange, grid: Grid) -> Step:
    """Return the step of an exchange between two meshes, priced by what some of its ranks receive."""
    ranks = list(exchange.dst.mesh.ranks)
    sampled = ranks[:: max(1, len(ranks) // 8)]
    taken = [[p for p in exchange.incoming(r) if p.src_rank != r] for r in sampled]
    partners = max((len(pieces) for pieces in taken), default=0)
    size_bytes = max(sum(p.elems for p in pieces) for pieces in taken) * grid.itemsize
    node_size = exchange.node_size
    wide = node_size is not None and any(
        p.src_rank // node_size != p.dst_rank // node_size for pieces in taken for p in pieces
    )
    seconds = grid.prices.exchange(partners, size_bytes, "network" if wide else "node")
    return Step("exchange" if partners else "slice", (), (exchange,), seconds)


@dataclass(frozen=True)
class _StepData:
    """A step as JSON has it."""

    kind: StepKind
    axes: tuple[str, ...]
    exchanges: tuple[Exchange, ...]
    predicted_s: float


@reader("redistribution plan", PlanError)
def _read(src: Layout, dst: Layout, steps: tuple[_StepData, ...], is_default: bool) -> RedistributePlan:
    for step in steps:
        if not 1 <= len(step.exchanges) <= 2 or step.predicted_s < 0:
            raise PlanError(
                f"a step has 1 or 2 exchanges and takes 0 seconds or more, got {len(step.exchanges)} and "
                f"{step.predicted_s}"
            )
    made = tuple(Step(s.kind, s.axes, s.exchanges, float(s.predicted_s)) for s in steps)
    plan = RedistributePlan(src, dst, made, is_default)
    _verify(plan)
    return plan


def _verify(plan: RedistributePlan) -> None:
    """Raise PlanError unless a planner makes each step between the layouts that it has."""
    src, dst, steps = plan.src, plan.dst, plan.steps
    ends = [src, *(step.dst for step in steps)], [*(step.src for step in steps), dst]
    one_grid, node_size = on_one_grid(src, dst), steps[0].exchanges[0].node_size if steps else None
    is_chain = (
        all(a == b for a, b in zip(*ends, strict=True))
        if steps
        else one_grid and state_of(src) == state_of(dst)
    )
    if not is_chain or (src.shape, src.dtype) != (dst.shape, dst.dtype):
        raise PlanError("the steps of this plan do not lead from its src to its dst, one after the other")
    grid = Grid(dst, prices_of(None), node_size)
    if not one_grid:
        expected = _across(src, dst, grid, node_size)
    else:
        moves = [grid.move(state_of(step.src), state_of(step.dst)) for step in steps]
        expected = _along(src, dst, moves, grid, node_size)
    if one_grid:
        _verify_terms(plan, grid)
    for number, (step, wanted) in enumerate(zip_longest(steps, expected), 1):
        if step != wanted:
            raise PlanError(
                f"step {number} of this plan is not what leads from {src} to {dst}: expected {wanted}, got {step}"
            )


def _verify_terms(plan: RedistributePlan, grid: Grid) -> None:
    """Raise PlanError where the steps fold terms that stay, make terms that go, or round between two folds."""
    layouts = [plan.src, *(step.dst for step in plan.steps)]
    together = grid.folds_together(state_of(plan.src), state_of(plan.dst))
    for axis, (before, after) in enumerate(zip(plan.src.partials, plan.dst.partials, strict=True)):
        ops = [op for op, _ in groupby(layout.partials[axis] for layout in layouts)]
        by_value = [op for op, _ in groupby((before, None, after))]
        direct = [op for op, _ in groupby((before, after))]
        allowed = [by_value] if together else [direct] if before == after else [direct, by_value]
        if ops not in allowed:
            raise PlanError(
                f"mesh axis {plan.dst.mesh.axis_names[axis]!r} goes from partial {before} to {after}, at most by "
                f"way of None; got {ops}"
            )
    folds = [step.folded for step in plan.steps if step.folded]
    axes = sum(reversed(folds), ())
    if len(folds) > 1 and (list(axes) != sorted(axes) or not grid.folds_apart(state_of(plan.src), axes)):
        raise PlanError(
            f"the terms of {plan.src} are folded in one step: apart, in the order {folds}, they give other bits"
        )
