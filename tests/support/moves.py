"""One move of an array from a layout to another, checked against slicing the global array."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np

from lowshard import (
    DeviceMesh,
    Layout,
    Partial,
    RedistributePlan,
    Replicated,
    Sharded,
    execute,
    plan_redistribute,
)
from lowshard import dtypes as dt
from lowshard.box import intersect, volume
from lowshard.comm import Communicator
from lowshard.comm.loopback import _ThreadReach
from lowshard.cost import ClusterProfile
from lowshard.selftest.fold_cases import plain_fold

WAYS = ("as sizes ask", "read in place", "laid out", "in rounds")
"""Ways that bytes can take; see `take_way`."""

_seen = _ThreadReach.maps
Coord = tuple[int, ...]


def _term(layout: Layout, coord: Coord, seed: int, kind: str) -> np.ndarray:
    """Return the global array of one partial term; equal for coordinates that differ elsewhere."""
    key = [c for c, op in zip(coord, layout.partials, strict=True) if op is not None]
    rng = np.random.default_rng([seed, *key])
    row = dt.get(layout.dtype)
    if kind == "float":
        return rng.standard_normal(layout.shape).astype(np.float32).astype(row.numpy)
    if key:
        op = next(op for op in layout.partials if op is not None)
        low, high = {"prod": (1, 3), "min": (0, 8), "max": (0, 8)}.get(op, (0, 2))
        return rng.integers(low, high, layout.shape).astype(np.float32).astype(row.numpy)
    # No arithmetic ahead: any bytes will do, but for bool, whose bytes are 0 and 1.
    if row.kind == "bool":
        return rng.integers(0, 2, layout.shape).astype(bool)
    count = int(np.prod(layout.shape))
    return np.frombuffer(rng.bytes(count * row.itemsize_bytes), row.numpy).reshape(layout.shape)


def _with_gaps(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return an array whose elements do not lie one behind the other."""
    whole: np.ndarray = np.empty((*shape, 2), dtype)
    return whole[..., 0]


def expected(src: Layout, dst: Layout, rank: int, seed: int, kind: str) -> np.ndarray | None:
    """Return what a rank of dst must hold, by slicing and folding whole arrays."""
    if rank not in dst.mesh:
        return None
    row = dt.get(src.dtype)
    coord = dst.mesh.coord(rank)
    # One grid of ranks, whatever its axes are called: what is partial stays so, by the axis's position.
    same = (src.mesh.shape, src.mesh.ranks) == (dst.mesh.shape, dst.mesh.ranks)
    kept = [a for a, op in enumerate(src.partials) if op and same and dst.partials[a] == op]
    folded = [a for a, op in enumerate(src.partials) if op and a not in kept]
    if (
        row.kind in ("int", "uint")
        and folded
        and any(op == "avg" and n > 1 for op, n in zip(src.partials, src.mesh.shape, strict=True))
    ):  # a mean of integers is rounded once, after all terms
        kept, folded = [], sorted(kept + folded)
    slices = tuple(slice(a, b) for a, b in dst.box(rank))
    for a, op in enumerate(dst.partials):
        if op and a not in kept and op != "avg" and coord[a] != 0:
            return np.broadcast_to(_identity(op, row), dst.local_shape(rank))
    terms = []
    for where in product(*(range(src.mesh.shape[a]) for a in folded)):
        at = [coord[a] if a in kept else 0 for a in range(src.mesh.ndim)]
        for a, c in zip(folded, where, strict=True):
            at[a] = c
        terms.append(_term(src, tuple(at), seed, kind)[slices])
    if not folded:
        return terms[0]
    ops = {src.partials[a] for a in folded}
    divisor = int(np.prod([src.mesh.shape[a] for a in folded if src.partials[a] == "avg"]))
    op = "sum" if ops & {"sum", "avg"} else str(ops.pop())
    return plain_fold(terms, op, "tree", divisor)


def _identity(op: str, row: dt.DType) -> Any:
    if op in ("sum", "prod"):
        return np.array(op == "prod").astype(row.numpy)
    if row.kind == "bool":
        return np.array(op == "min")
    if row.kind in ("int", "uint"):
        info = np.iinfo(row.numpy)
        return np.array(info.max if op == "min" else info.min, row.numpy)
    import ml_dtypes

    info = ml_dtypes.finfo(row.numpy)
    if row.name == "float8_e4m3fn":
        return np.array(info.max if op == "min" else info.min, row.numpy)
    return np.array(np.inf if op == "min" else -np.inf).astype(row.numpy)


def take_way(name: str, put: Callable[[object, str, Any], None] = setattr) -> None:
    """Let small arrays go the way of large ones.

    Args:
        name: "read in place" whatever can be; "laid out" by every rank for the others, in rounds; "in rounds" of
            messages; "as sizes ask".
        put: sets an attribute.
    """
    module = sys.modules["lowshard.execute"]
    put(
        module,
        "READ_FROM_BYTES",
        1 << 60 if name == "in rounds" else 64 << 10 if name == "as sizes ask" else 0,
    )
    put(module, "SEND_FROM_BYTES", 40 if name == "in rounds" else 32 << 20)
    put(module, "STAGE_BYTES", 48 if name == "laid out" else 8 << 20)
    put(_ThreadReach, "maps", (lambda reach, array: False) if name == "laid out" else _seen)
    put(module, "_KERNEL_FROM_BYTES", 0 if name in ("read in place", "laid out") else 16 << 10)


def calls_of(plan: RedistributePlan) -> set[str]:
    """Return the collectives that may carry a plan: those of its steps, or exchanges of boxes."""
    kinds = {step.kind for step in plan.steps if step.moves_bytes()}
    if "all_reduce" in kinds:
        kinds |= {"reduce_scatter", "all_gather"}
    if "all_gather" in kinds:
        kinds.add("all_gather_v")
    return kinds | {"all_to_all_v"}


def run_plan(comm: Communicator, plan: RedistributePlan, seed: int, kind: str = "int") -> None:
    """Move one array on this rank by a plan; assert its bytes, and that the traffic is what the plan says."""
    rank, src, dst = comm.rank, plan.src, plan.dst
    local = None
    if rank in src.mesh:
        slices = tuple(slice(a, b) for a, b in src.box(rank))
        values = np.asarray(_term(src, src.mesh.coord(rank), seed, kind)[slices])
        # In memory that the others read where it lies; in private memory; or there with gaps.
        local = [comm.empty, np.empty, _with_gaps][(seed + rank) % 3](values.shape, values.dtype)
        local[...] = values
    before = None if local is None else local.tobytes()
    comm.traffic.clear()
    place = None
    if seed % 2 and rank in dst.mesh:
        place = np.empty(dst.local_shape(rank), dst.numpy_dtype)
    out = execute(plan, local, comm, place)
    assert place is None or out is place
    if local is not None:
        assert local.tobytes() == before, "the source was written to"
    want = expected(src, dst, rank, seed, kind)
    if want is None:
        assert out is None
    else:
        assert isinstance(out, np.ndarray)
        assert out.shape == dst.local_shape(rank)
        assert out.dtype == dst.numpy_dtype
        assert out.tobytes() == np.ascontiguousarray(want).tobytes(), f"{src} -> {dst} on rank {rank}"
    assert comm.traffic.received_bytes == plan.received_bytes(rank)
    assert comm.traffic.sent_bytes == plan.sent_bytes(rank)
    assert set(comm.traffic.calls) <= calls_of(plan)


def check_move(
    comm: Communicator, src: Layout, dst: Layout, seed: int, kind: str = "int",
    cost: ClusterProfile | None = None, node_size: int | None = None,
) -> None:  # fmt: skip
    """Move one array on this rank as planned here; assert its bytes, and that none more than needed move."""
    rank = comm.rank
    plan = plan_redistribute(src, dst, cost, node_size)
    run_plan(comm, plan, seed, kind)
    if cost is not None or rank not in dst.mesh:  # with a profile seconds decide, not bytes
        return
    folded = any(step.folded for step in plan.steps)
    if not folded and not any(step.fresh for step in plan.steps):
        wanted, own = dst.box(rank), src.box(rank) if rank in src.mesh else None
        held = intersect(wanted, own) if own is not None else None
        need = volume(wanted) - (volume(held) if held is not None else 0)
        assert comm.traffic.received_bytes == need * src.itemsize_bytes
    else:
        # Each rank folds the terms of its share, and then lacks the rest of its box.
        terms = int(np.prod([src.mesh.shape[a] for step in plan.steps for a in step.folded]))
        share = plan.steps[0].exchanges[0].dst.local_bytes(rank) if plan.steps else 0
        assert comm.traffic.received_bytes <= terms * share + dst.local_bytes(rank) - share


def placements_of(ndim: int, ops: tuple[str, ...] = ("sum",)) -> list[Any]:
    """Return every placement an axis may have for an array of so many dims."""
    return [Replicated(), *(Sharded(d) for d in range(ndim)), *(Partial(op) for op in ops)]  # type: ignore[arg-type]


def random_layout(rng: random.Random, mesh: DeviceMesh, shape: tuple[int, ...], dtype: str) -> Layout:
    """Return any layout, from a plain generator that every rank of a job seeds alike."""
    kind = dt.get(dtype).kind
    op = rng.choice([o for o in ("sum", "min", "max", "prod", "avg") if not (kind == "bool" and o == "avg")])
    placed: dict[str, int] = {}
    partials: dict[str, Any] = {}
    for axis in mesh.axis_names:
        choice = rng.choice(["R", *range(len(shape)), *(["P"] if kind != "scale" else [])])
        if choice == "P":
            partials[axis] = op
        elif choice != "R":
            placed[axis] = int(choice)
    order = rng.sample(list(placed), len(placed))
    spec = tuple(tuple(a for a in order if placed[a] == dim) for dim in range(len(shape)))
    return Layout.from_spec(
        mesh, shape, dtype, spec, rng.choice(["balanced", "balanced", "ceil"]), partial=partials
    )


def random_pair(rng: random.Random, size: int) -> tuple[Layout, Layout]:
    """Return two layouts of one array on meshes of `size` ranks, mostly on the same mesh."""
    grids = [(size,)] + [(a, size // a) for a in range(1, size + 1) if size % a == 0]
    grids += [(a, b, size // a // b) for a in (1, 2, 3) for b in (1, 2) if size % (a * b) == 0]
    names = ("dp", "tp", "pp")

    def mesh() -> DeviceMesh:
        grid = rng.choice(grids)
        if rng.random() < 0.2 and size > 1:  # a part of the world, in any order
            part = rng.randint(1, size - 1)
            return DeviceMesh((part,), ("dp",), ranks=rng.sample(range(size), part))
        return DeviceMesh(grid, names[: len(grid)])

    first = mesh()
    second = first if rng.random() < 0.7 else mesh()
    shape = tuple(rng.choice((0, 1, 2, 3, 5, 7, 12, 13)) for _ in range(rng.randint(0, 3)))
    dtype = rng.choice([r.name for r in dt.all_dtypes()])
    return random_layout(rng, first, shape, dtype), random_layout(rng, second, shape, dtype)
