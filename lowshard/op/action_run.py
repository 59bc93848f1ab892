"""Runs an action: moves each operand to where the action needs it, then computes each rank's part of the op."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np

from lowshard.argument import brief
from lowshard.comm.agreement import collective_step, control_of
from lowshard.comm.communicator import Communicator
from lowshard.comm.work import Stream
from lowshard.errors import BufferMismatchError, MeshError, PlanError
from lowshard.execute import execute_all, read_only_view
from lowshard.foreign_array import is_foreign, like, view_of
from lowshard.kernels.buffer import address_range, is_gpu
from lowshard.layout import Layout
from lowshard.mesh import DeviceMesh
from lowshard.op.op_part import Array, Part, find_kernel, run_kernel, subgroup
from lowshard.placement import Replicated
from lowshard.redistribute_plan import plan_redistribute
from lowshard.solver.action import Action, action_set
from lowshard.solver.table import RULES, dtype_error


def run_action(
    action: Action, operands: Sequence[Array | None], comm: Communicator, *, stream: Stream = None
) -> tuple[Array | None, ...]:
    """Run an op as an action says and return this rank's part of each result, laid out as `action.outputs`.

    Collective: all ranks of the communicator call this, with equal actions.

    Results are row-major. One that is nothing but an operand seen otherwise (a reshape, say) is a read-only view of it;
    torch and CuPy, which have none, get a copy.

    Args:
        action: from `pick` or a solver.
        operands: this rank's part of each operand, of shape `action.sources[k].local_shape(rank)` and that dtype;
            None on a rank outside the mesh. Results are of the library that the first one is of that is not NumPy's or
            CuPy's.
        comm: a communicator whose ranks are those of the mesh; it may have more.
        stream: as for `lowshard.execute`.

    Every rank raises the same error.

    Raises:
        BufferMismatchError: operands of another number, shape or dtype.
        DTypeError: the op does not take the dtype, or a row of the action does not hold for it.
        LayoutError: the op has no kernel, or does not take the operands; indices are out of range (on a GPU they are
            not looked at).
        MeshError: the communicator has fewer ranks than the mesh names.
        MismatchError: the ranks hold different actions.
    """
    control_of(comm)
    with comm.meeting("run_action", stream) as wrong:
        with collective_step(comm, "run_action", said=partial(str, action)) as step:
            step.error = wrong
            seen = _seen(operands)
            _check_arguments(action, seen, comm)
            step.digest = bytes.fromhex(action.digest())
        needed = move_operands(action, seen, comm)
        results = kept_apart(compute(action, needed, comm), seen)
    sample = next(filter(is_foreign, operands), None)
    return tuple(like(result, sample, apart=True) for result in results)


def _seen(operands: Any) -> Any:
    """Return a sequence's arrays of any library as NumPy's or CuPy's."""
    if not isinstance(operands, (list, tuple)):
        return operands
    return [view_of(x, f"operand {k}") for k, x in enumerate(operands)]


def move_operands(action: Action, operands: Sequence[Array | None], comm: Communicator) -> list[Array | None]:
    """Return the operands in the layouts the action needs them in.

    Collective: all ranks of the communicator call this.
    """
    _need_form(action, operands, comm)
    plans = {
        str(k): plan_redistribute(source, needed)
        for k, (source, needed) in enumerate(zip(action.sources, action.inputs, strict=True))
        if source != needed
    }
    moved: dict[str, Array | None] = {}
    if plans:
        moved = execute_all(plans, {name: operands[int(name)] for name in plans}, comm)
    return [moved.get(str(k), operand) for k, operand in enumerate(operands)]


def compute(action: Action, operands: Sequence[Array | None], comm: Communicator) -> tuple[Array | None, ...]:
    """Return this rank's part of each result, from operands that lie in `action.inputs`; perhaps views of them.

    Collective where a row has collectives inside, or the op reads indices, which one rank alone may find out of range:
    all ranks of the communicator call this.
    """
    _need_form(action, operands, comm)
    if any(row.how != "local" for row in action.rows):
        _make_groups(action, comm)
    may_fail_alone = comm.xp is np and action.op in RULES and RULES[action.op].reads_indices
    results: tuple[Array | None, ...] = (None,) * len(action.results)
    with collective_step(comm, action.op) if may_fail_alone else nullcontext():
        if comm.rank in action.mesh:
            results = run_kernel(Part(action, comm.rank, comm, comm.xp), *operands)
    return results


def kept_apart(results: Sequence[Array | None], given: Iterable[Array | None]) -> tuple[Array | None, ...]:
    """Return results; one that shares memory with what was given, or with another result, is a read-only view."""
    every = enumerate((*results, *given))
    spans = sorted((*address_range(x), k) for k, x in every if x is not None and x.size)
    shared: set[int] = set()
    end, last = 0, -1  # of what reaches furthest so far
    for start, stop, k in spans:
        if start < end:
            shared |= {k, last}
        if stop > end:
            end, last = stop, k
    return tuple(read_only_view(x) if k in shared else x for k, x in enumerate(results))


def unsharded(op: str, *arrays: Array, **op_args: Any) -> tuple[Array, ...]:
    """Return the results of an op on whole arrays, perhaps read-only views of them: what the sharded op must equal.

    Raises:
        DTypeError: the op does not take the dtype.
    """
    mesh = DeviceMesh((1,), ("one",))
    sample = next(filter(is_foreign, arrays), None)
    arrays = tuple(view_of(x, f"operand {k}") for k, x in enumerate(arrays))
    for x in arrays:
        if not isinstance(x, np.ndarray) and not is_gpu(x):
            raise BufferMismatchError(f"{brief(op)} runs on NumPy or CuPy arrays, got {brief(x)}")
    layouts = [Layout(mesh, x.shape, x.dtype, (Replicated(),)) for x in arrays]
    found = action_set(op, layouts, **op_args)
    action = found.action([found.axis_assignments[0]])
    refused = dtype_error(op, layouts, action.rows)
    if refused is not None:
        raise refused
    results = kept_apart(run_kernel(Part(action, 0, None, _module_of(arrays)), *arrays), arrays)
    return tuple(like(result, sample, apart=True) for result in results)


def _module_of(arrays: Sequence[Array]) -> Any:
    if all(isinstance(x, np.ndarray) for x in arrays):
        return np
    import cupy

    return cupy


def _make_groups(action: Action, comm: Communicator) -> None:
    """Make every group that a kernel may ask for. All ranks take part in the making, but perhaps not in the use: ranks
    outside the mesh, and groups in which nothing moves.
    """
    part = Part(action, action.mesh.ranks[0], comm)
    seen = set()
    for how in sorted({row.how for row in action.rows} - {"local"}):
        for k, layout in enumerate(action.sources):
            seen |= {part.axes(how, k, d) for d in range(layout.ndim)}
            seen.add(tuple(sorted({a for d in range(layout.ndim) for a in part.axes(how, k, d)})))
    for axes in sorted(seen - {()}):
        subgroup(comm, action.mesh, axes)


def _need_form(action: object, operands: object, comm: Communicator) -> None:
    """Raise what is wrong with the kind of the arguments, or with the number of operands."""
    control_of(comm)
    if not isinstance(action, Action):
        raise PlanError(f"an op runs as an Action says, from pick or a solver, got {brief(action)}")
    count = len(action.sources)
    if not isinstance(operands, Sequence) or isinstance(operands, (str, bytes)) or len(operands) != count:
        got = len(operands) if isinstance(operands, (tuple, list)) else brief(operands)
        raise BufferMismatchError(
            f"{action.op} takes {count} operands, a sequence of one for each of action.sources; got {got}"
        )


def _check_arguments(action: Action, operands: Sequence[Array | None], comm: Communicator) -> None:
    """Raise what is wrong with this rank's arguments."""
    _need_form(action, operands, comm)
    find_kernel(action.op)
    if comm.size <= max(action.mesh.ranks):
        raise MeshError(
            f"{action.op}: mesh {action.mesh} names ranks up to {max(action.mesh.ranks)}, the communicator has "
            f"{comm.size}; start {max(action.mesh.ranks) + 1} ranks or make a smaller mesh"
        )
    refused = dtype_error(action.op, action.sources, action.rows)
    if refused is not None:
        raise refused
    for k, (operand, layout) in enumerate(zip(operands, action.sources, strict=True)):
        check_part(f"{action.op}: operand {k}", operand, layout, comm)


def check_part(what: str, part: Any, layout: Layout, comm: Communicator) -> None:
    """Raise what is wrong with this rank's part of an array."""
    if comm.rank not in layout.mesh:
        return
    shape = layout.local_shape(comm.rank)
    if isinstance(part, comm.xp.ndarray) and tuple(part.shape) == shape and part.dtype == layout.numpy_dtype:
        return
    came = (
        f"shape {tuple(part.shape)} and dtype {part.dtype}" if hasattr(part, "dtype") else type(part).__name__
    )
    raise BufferMismatchError(
        f"{what} in {layout} is on rank {comm.rank} a {comm.xp.__name__} array of shape {shape} and dtype "
        f"{layout.dtype}, got {came}"
    )
