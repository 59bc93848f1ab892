"""Runs a redistribution plan: packs, exchanges, unpacks and folds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from lowshard import dtypes
from lowshard.argument import brief, in_words, kind_of
from lowshard.comm.agreement import collective_step, control_of, share
from lowshard.comm.communicator import Communicator
from lowshard.comm.work import Stream
from lowshard.content_hash import text_digest
from lowshard.cost import ClusterProfile
from lowshard.errors import BufferMismatchError, DTypeError, LowshardError, MeshError, PlanError
from lowshard.foreign_array import READ_ONLY, like, view_in_call
from lowshard.kernels.buffer import allocate, require_results_apart, share_memory
from lowshard.layout import Layout
from lowshard.pool import BufferPool
from lowshard.redistribute_plan import RedistributePlan, plan_redistribute
from lowshard.transfer import exchange_runner
from lowshard.transfer.rank_schedule import Program, StepProgram, form_of, programs

Array = Any

_HOST = np.empty(0)


def execute(
    plan: RedistributePlan, local: Array | None, comm: Communicator, out: Array | None = None, *,
    pool: BufferPool | None = None, profile: bool = False, stream: Stream = None,
) -> Array | None:  # fmt: skip
    """Move a rank's local array as the plan says and return its part of the destination.

    Collective: all ranks of the communicator call this. Partial terms fold in tree order over their
    ranks, so the bits are the same on every transport.

    Beside local and result nothing is held but what one step leaves for the next, no larger than the two, and one
    slab of bounded size. Among ranks of a node arrays of `comm.empty` are read where they lie, and so are others where
    their boxes are long runs and the system allows it; else they take one more pass.

    Every rank raises the same error, whichever rank is at fault.

    Args:
        plan: from `plan_redistribute`, equal on every rank (its digest is compared first).
        local: this rank's part of `plan.src`, of shape `plan.src.local_shape(rank)`; None on a rank
            outside the source mesh.
        comm: a communicator whose ranks are those of the meshes; it may have more ranks, which pass
            None.
        out: where to put the result: C-contiguous, of shape `plan.dst.local_shape(rank)`, not
            overlapping local. By default a new array of the library that local is of; where no rank needs a byte from
            another, a read-only view of local may be returned instead (torch and CuPy, which have none, get a copy).
        pool: where a new result comes from.
        profile: take the time of each step, on the slowest rank, for `plan.explain()`; ranks synchronise between steps.
        stream: on GPUs, where the work is put, as for the calls of a `Communicator`; by default the current one.

    Returns:
        This rank's part of `plan.dst`, or None on a rank outside the destination mesh.

    Raises:
        PlanError: plan is not a RedistributePlan, or profile is neither True nor False.
        MeshError: the communicator has fewer ranks than the meshes name.
        BufferMismatchError: local or out has another shape, dtype or memory order than required.
        MismatchError: the ranks hold different plans, or not all profile.
        CommError: comm is not a communicator, or a stream is given and comm moves host memory.
        StreamError: stream is not a stream, or belongs to another device.
        DTypeError: the plan folds what has no mean (bools), or float8 on a GPU.
    """
    control = control_of(comm)
    times: list[float] | None = [] if profile is True else None
    with comm.meeting("execute", stream) as wrong:
        with collective_step(comm, "execute", said=partial(_words, plan), once=True) as step:
            step.error = wrong
            mine, into = _seen(local, out)
            _check_arguments(plan, mine, comm, into, pool, profile)
            step.digest = plan.digest_bytes[::-1] if profile else plan.digest_bytes
        result = _given_back(_walk(plan, mine, into, comm, pool, times), local, out)
    if times is None:
        return result
    rows = share(control, np.array(times, np.float64)) if times else []
    plan.note_measured([float(max(row[i] for row in rows)) for i in range(len(times))])
    return result


def execute_all(
    plans: Mapping[str, RedistributePlan],
    local: Mapping[str, Array | None],
    comm: Communicator,
    out: Mapping[str, Array] | None = None,
    *,
    pool: BufferPool | None = None,
    stream: Stream = None,
) -> dict[str, Array | None]:
    """Move many arrays, each by its plan, after one agreement over all of them.

    Collective: all ranks of the communicator call this, with the same names in the same order. As
    `execute` for each name; an array without an entry in `out` gets a new one. Nothing has moved when it raises.

    Raises:
        BufferMismatchError: `local` or `out` does not fit the names of `plans`, or an array of `out` shares memory with
            another, or with one of `local`.
        LowshardError: as `execute`.
    """
    control_of(comm)
    given: Mapping[str, Array] = {} if out is None else out
    seen: dict[str, tuple[Array | None, Array | None]] = {}
    with comm.meeting("execute_all", stream) as wrong:
        with collective_step(comm, "execute_all", once=True) as step:
            step.error = wrong
            tables: dict[str, object] = {"plans": plans, "local": local, "out": given}
            for what, table in tables.items():
                if not isinstance(table, Mapping):
                    raise BufferMismatchError(f"{what} is a mapping by name, got {brief(table)}")
            for name, plan in plans.items():
                try:
                    seen[name] = _seen(local.get(name), given.get(name))
                    _check_arguments(plan, seen[name][0], comm, seen[name][1], pool)
                except LowshardError as error:
                    raise type(error)(f"{name!r}: {error}") from error.__cause__
            strange = (local.keys() | given.keys()) - plans.keys()
            if strange:
                raise BufferMismatchError(
                    f"arrays were given for {sorted(map(str, strange))}, for which there is no plan"
                )
            outs, sources = ([(n, a[i]) for n, a in seen.items() if a[i] is not None] for i in (1, 0))
            # All are read and written one after the other.
            require_results_apart(outs, comm.rank, lambda *_: False, sources)
            step.digest = text_digest("".join(f"{name}={plan.digest()};" for name, plan in plans.items()))
            step.said = lambda: in_words({n: _words(plan) for n, plan in plans.items()})
        return {
            name: _given_back(_walk(plan, *seen[name], comm, pool), local.get(name), given.get(name))
            for name, plan in plans.items()
        }


def redistribute(
    local: Array | None, src: Layout, dst: Layout, comm: Communicator, out: Array | None = None, *,
    cost: ClusterProfile | None = None, pool: BufferPool | None = None, stream: Stream = None,
) -> Array | None:  # fmt: skip
    """Move a rank's local array from layout `src` to layout `dst`: plan, then execute.

    Collective: all ranks of the communicator call this. Where its ranks are on several nodes, copies of the own node
    are read first. Arguments, result and errors: as for `execute`, and those of `plan_redistribute`, on every rank.
    """
    control_of(comm)
    with comm.meeting("redistribute", stream) as wrong:
        with collective_step(comm, "redistribute", once=True) as step:
            step.error = wrong
            mine, into = _seen(local, out)
            plan = plan_redistribute(src, dst, cost, comm.node_size)
            _check_arguments(plan, mine, comm, into, pool)
            step.digest, step.said = plan.digest_bytes, partial(_words, plan)
        return _given_back(_walk(plan, mine, into, comm, pool), local, out)


def _words(plan: RedistributePlan) -> str:
    """Return a plan's description, for a message about ranks with different plans."""
    return f"{plan.src} to {plan.dst} on mesh {plan.dst.mesh}"


def _seen(local: object, out: object) -> tuple[Array | None, Array | None]:
    """Return arrays of any library as NumPy's or CuPy's."""
    if all(a is None or (type(a) is np.ndarray and a.dtype.isnative) for a in (local, out)):
        return local, out
    return view_in_call(local, "local"), view_in_call(out, "out", writes=True)


def _given_back(result: Array | None, local: object, out: Any) -> Any:
    """Return the result as the given array, or as one of the input's library."""
    if result is None:
        return None
    return like(result, local, apart=True) if out is None else out


def _walk(
    plan: RedistributePlan, local: Array | None, out: Array | None, comm: Communicator,
    pool: BufferPool | None, times: list[float] | None = None,
) -> Array | None:  # fmt: skip
    """Run the steps of a plan that all ranks have agreed on."""
    if not plan.steps:
        return _same(local, out)
    with comm.turn("execute"):
        return _steps(plan, local, comm, out, pool, times)


def _steps(
    plan: RedistributePlan, local: Array | None, comm: Communicator, out: Array | None,
    pool: BufferPool | None, times: list[float] | None,
) -> Array | None:  # fmt: skip
    steps = programs(plan, comm.rank, comm.reach.homes)
    last = steps[-1].parts[-1]
    for step in steps:
        if times is not None:
            control_of(comm).barrier()
            begin_s = time.perf_counter()
        if step.whole is not None and comm.reach.whole and exchange_runner.reads_peers(step.whole):
            part = step.parts[-1]
            result = out if part is last and out is not None else _result(part, comm, part is last, pool)
            exchange_runner.run(step.whole, local, result, comm)
            local = result
        elif step.native:
            part = step.parts[-1]
            result = out if part is last and out is not None else _result(part, comm, part is last, pool)
            _collective(step, comm.xp.ascontiguousarray(local), result, comm)
            local = result
        else:
            for part in step.parts:
                local = _run(part, local, comm, out if part is last else None, part is last, pool)
        if times is not None:
            if comm.xp is not np:
                comm.xp.cuda.get_current_stream().synchronize()
            times.append(time.perf_counter() - begin_s)
    return local


def _collective(step: StepProgram, local: Array | None, out: Array | None, comm: Communicator) -> None:
    """Run a step with the communicator's own collective."""
    first = step.parts[0]
    op = "avg" if first.divisor != 1 else first.op
    if step.native == "all_gather":
        comm.all_gather(local, out)
    elif step.native == "all_gather_v":
        comm.all_gather_v(local, out, *step.counts)
    elif step.native == "reduce_scatter":
        comm.reduce_scatter(local, out, op, "tree")  # type: ignore[arg-type]
    else:
        comm.all_reduce(local, out, op, "tree")  # type: ignore[arg-type]


def _run(
    program: Program, local: Array | None, comm: Communicator, out: Array | None, is_last: bool,
    pool: BufferPool | None,
) -> Array | None:  # fmt: skip
    """Run one exchange and return this rank's result."""
    if out is None and local is not None and program.view is not None:
        view = local[(*program.view, ...)]  # an array even when 0-d
        return read_only_view(view) if is_last else view
    result = out if out is not None else _result(program, comm, is_last, pool)
    exchange_runner.run(program, local, result, comm)
    return result


def _result(program: Program, comm: Communicator, is_last: bool, pool: BufferPool | None) -> Array | None:
    """Return a new array for a result; an intermediate one is allocated where peers can read it."""
    if program.shape is None:
        return None
    dtype = program.dtype if comm.xp is np else dtypes.get(program.dtype).in_memory(comm.xp)
    if comm.xp is np and not is_last:
        return comm.empty(program.shape, dtype)
    if is_last and pool is not None:
        return pool.empty(program.shape, dtype)
    if comm.xp is np:
        return allocate(program.shape, dtype, _HOST)
    return comm.xp.empty(program.shape, dtype)


def _same(local: Array | None, out: Array | None) -> Array | None:
    if local is None or out is None:
        return None if local is None else read_only_view(local[...])
    out[...] = local
    return out


def read_only_view(view: Array) -> Array:
    """Return a view that cannot be written; on a GPU a copy."""
    if not isinstance(view, np.ndarray):
        return view.copy()  # CuPy has no read-only arrays
    view = view.view()
    view.flags.writeable = False
    return view


# ---- checks


def _check_arguments(
    plan: object,
    local: Array | None,
    comm: Communicator,
    out: Array | None,
    pool: object,
    profile: object = False,
) -> None:
    """Raise what is wrong with this rank's arguments."""
    if not isinstance(plan, RedistributePlan):
        raise PlanError(f"plan is a RedistributePlan, from plan_redistribute, got {type(plan).__name__}")
    if pool is not None and not isinstance(pool, BufferPool):
        raise BufferMismatchError(f"pool is a BufferPool or None, got {brief(pool)}")
    if not isinstance(profile, bool):
        raise PlanError(f"profile is True or False, got {brief(profile)}")
    form = form_of(plan, comm.rank)
    if (
        comm.xp is np
        and form.dtype != bool
        and comm.size >= plan.world_size
        and (_is_array(local, form.local, form.dtype) if form.local is not None else local is None)
        and (
            out is None
            or (
                form.out is not None
                and _is_array(out, form.out, form.dtype)
                and out.flags.c_contiguous
                and out.flags.writeable
                and not (local is not None and np.may_share_memory(local, out))
            )
        )
    ):
        return
    if comm.size < plan.world_size:
        raise MeshError(
            f"meshes {plan.src.mesh} and {plan.dst.mesh} name ranks up to {plan.world_size - 1}, but the "
            f"communicator has {comm.size}; start {plan.world_size} ranks, as `lowshard run "
            f"-n {plan.world_size}` does, or make a smaller mesh"
        )
    if comm.xp is not np and any(step.folded for step in plan.steps) and dtypes.get(plan.src.dtype).is_float8:
        raise DTypeError(f"partial {plan.src.dtype} terms cannot be folded on a GPU; cast to float32 first")
    if form.dtype == bool and any(step.src.partials[a] == "avg" for step in plan.steps for a in step.folded):
        raise DTypeError(
            f"the terms of {plan.src} have no mean: bools are folded by sum (or), min, max or prod"
        )
    for array, layout, name in ((local, plan.src, "local"), (out, plan.dst, "out")):
        if array is None and name == "out":
            continue
        wrong = _array_error(array, layout, name, comm)
        if wrong is not None:
            raise BufferMismatchError(wrong)
    if local is None or out is None:
        return
    if comm.xp is np and not out.flags.writeable:
        raise BufferMismatchError(f"out {READ_ONLY}")
    if share_memory(local, out):
        raise BufferMismatchError("out overlaps local; give it memory of its own, or pass out=None")


def _is_array(array: Array | None, shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    return isinstance(array, np.ndarray) and array.shape == shape and array.dtype == dtype


def _array_error(array: Array | None, layout: Layout, name: str, comm: Communicator) -> str | None:
    if comm.rank not in layout.mesh:
        if array is None:
            return None
        return (
            f"rank {comm.rank} is not in mesh {layout.mesh} of {layout}, so its {name} is None; "
            f"got an array of shape {getattr(array, 'shape', '?')}"
        )
    shape, dtype = layout.local_shape(comm.rank), dtypes.get(layout.numpy_dtype).in_memory(comm.xp)
    if not isinstance(array, comm.xp.ndarray):
        return f"{name} is a {comm.xp.__name__} array of {dtype} and shape {shape}, got {kind_of(array)}"
    if tuple(array.shape) != shape or array.dtype != dtype:
        return (
            f"{name} of rank {comm.rank} in {layout} has shape {shape} and dtype {dtype}, "
            f"got shape {tuple(array.shape)} and dtype {array.dtype}"
        )
    if name == "out" and not array.flags.c_contiguous:
        return (
            f"out is C-contiguous, got strides {array.strides} for shape {shape}; pass a contiguous array and copy the "
            "result, or no out"
        )
    return None
