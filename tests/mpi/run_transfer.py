"""Run by four ranks on two nodes, two each: what `execute`, reshards, refits and loads move, and by which way.

Argument: a folder that all ranks see. Counts what goes through MPI by the node it goes to. Rank 0 prints what held.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from lowshard import DeviceMesh, Layout, Partial, Replicated, Sharded, execute, plan_redistribute
from lowshard import comm as lc
from lowshard.comm.messages import Mailbox
from lowshard.reshard import Refit, TensorLayout, build_reshard_plan, execute_reshard_plan
from lowshard.tiling import Tiling
from lowshard.weights import ShardingStrategy, load, nodes_of, plan_load, save

SMALL_BYTES = 32 << 10
"""What agreements and small facts may take."""


class Counting:
    """Notes the bytes of what is sent through MPI in groups of all ranks, by rank."""

    def __init__(self) -> None:
        self.sent: dict[int, int] = {}
        make = Mailbox.__init__

        def made(box: Mailbox, *args: Any, **options: Any) -> None:
            make(box, *args, **options)
            isend = box.isend

            def counted(message: Any, dest: int, tag: int = 0) -> Any:
                self.sent[dest] = self.sent.get(dest, 0) + np.asarray(message[0]).nbytes
                return isend(message, dest, tag)

            box.isend = counted

        Mailbox.__init__ = made  # type: ignore[method-assign]


def need_of(pairs: Any, rank: int, homes: Any, near: bool) -> int:
    """Return the bytes that a rank takes of ranks of its own node, or of other nodes; pairs of (source, bytes)."""
    return sum(size for source, size in pairs if source != rank and (homes[source] == homes[rank]) == near)


@contextmanager
def expecting(comm: Any, counting: Counting, near: int, far: int, sums_bytes: int = 0) -> Iterator[None]:
    """Assert what this rank takes by memory and over the wire, and that MPI carries what others need and no more."""
    comm.barrier()
    comm.traffic.clear()
    counting.sent.clear()
    yield
    homes = comm.reach.homes
    assert comm.traffic.reached_bytes == near, (comm.traffic.reached_bytes, near)
    extra = comm.traffic.received_bytes - near - far
    assert 0 <= extra <= sums_bytes, (comm.traffic.received_bytes, near, far)
    far_sent = sum(n for dst, n in counting.sent.items() if homes[dst] != homes[comm.rank])
    near_sent = sum(n for dst, n in counting.sent.items() if homes[dst] == homes[comm.rank])
    assert near_sent <= SMALL_BYTES, f"{near_sent} bytes went to ranks of the own node through MPI"
    total, needed = MPI.COMM_WORLD.allreduce(far_sent), MPI.COMM_WORLD.allreduce(far)
    assert needed <= total <= needed + 4 * (sums_bytes + SMALL_BYTES), (total, needed)


def execute_goes_by_memory_within_a_node(comm: Any, counting: Counting) -> None:
    mesh, rank, homes = DeviceMesh((4,), ("x",)), comm.rank, comm.reach.homes
    rows = Layout(mesh, (1024, 2048), "float32", (Sharded(0),))
    values = np.arange(1024 * 2048, dtype=np.float32).reshape(1024, 2048)
    grid = DeviceMesh((2, 2), ("node", "tp"))
    targets = [Layout(mesh, (1024, 2048), "float32", (Sharded(1),))]
    for placements in ((Sharded(0), Sharded(1)), (Sharded(0), Replicated()), (Sharded(1), Sharded(0))):
        targets += [Layout(grid, (1024, 2048), "float32", placements)]  # another mesh: boxes, no collective
    pairs = [(rows, dst) for dst in targets]
    for (src, dst), make in ((pair, make) for pair in pairs for make in (np.empty, comm.empty)):
        plan = plan_redistribute(src, dst, node_size=2)
        assert len(plan.steps) == 1
        local = make(src.local_shape(rank), np.float32)
        local[...] = values[tuple(slice(*s) for s in src.box(rank))]
        taken = [(p.src_rank, 4 * p.elems) for p in plan.steps[0].exchanges[0].incoming(rank)]
        near, far = (need_of(taken, rank, homes, here) for here in (True, False))
        with expecting(comm, counting, near, far):
            out = execute(plan, local, comm)
        assert np.array_equal(out, values[tuple(slice(*s) for s in dst.box(rank))])


def terms_are_folded_within_and_between_nodes(comm: Any, counting: Counting) -> None:
    mesh, rank = DeviceMesh((4,), ("x",)), comm.rank
    src = Layout(mesh, (999, 640), "float32", (Partial("max"),))  # shares are uneven: no collective's
    dst = Layout(mesh, (999, 640), "float32", (Sharded(0),))
    plan = plan_redistribute(src, dst)
    taken = [(p.src_rank, 4 * p.elems) for p in plan.steps[0].exchanges[0].incoming(rank)]
    near, far = (need_of(taken, rank, comm.reach.homes, here) for here in (True, False))
    terms = [np.random.default_rng(r).standard_normal((999, 640)).astype(np.float32) for r in range(4)]
    for make in (np.empty, comm.empty):
        local = make((999, 640), np.float32)
        local[...] = terms[rank]
        with expecting(comm, counting, near, far):
            out = execute(plan, local, comm)
        assert np.array_equal(out, np.maximum.reduce(terms)[slice(*dst.box(rank)[0])])


def model() -> tuple[dict[str, TensorLayout], dict[str, TensorLayout]]:
    src = {
        "rows": TensorLayout.sharded((1024, 1024), "float32", {"tp": (4, 1)}, {0: "tp"}),
        "columns": TensorLayout.sharded((1024, 512), "float32", {"tp": (4, 1)}, {1: "tp"}),
        "norm": TensorLayout.sharded((777,), "float32", {"dp": (4, 1)}),
    }
    dst = {
        "rows": TensorLayout.sharded((1024, 1024), "float32", {"tp": (4, 1)}, {1: "tp"}),
        "columns": TensorLayout.sharded((1024, 512), "float32", {"tp": (4, 1)}, {0: "tp"}),
        "norm": TensorLayout.sharded((777,), "float32", {"tp": (4, 1)}, {0: "tp"}),
    }
    return src, dst


def reshards_go_by_memory_within_a_node(comm: Any, counting: Counting) -> None:
    src, dst = model()
    plan, rank, homes = build_reshard_plan(src, dst, node_size=2), comm.rank, comm.reach.homes
    taken = [
        (m.src_rank, plan.move_bytes(m)) for found in plan.for_rank(rank).receives.values() for m in found
    ]
    near, far = (need_of(taken, rank, homes, here) for here in (True, False))
    assert near
    assert far
    for make in (np.empty, comm.empty):
        mine = {n: make(x.local_shape(rank), np.float32) for n, x in src.items()}
        out = {n: np.zeros(x.local_shape(rank), np.float32) for n, x in dst.items()}
        for array in mine.values():
            array[...] = rank + 1
        with expecting(comm, counting, near, far):
            execute_reshard_plan(plan, mine, out, comm)
        assert np.array_equal(
            out["rows"], np.repeat(np.arange(1, 5, dtype=np.float32), 256)[:, None] + np.zeros((1, 256))
        )
        with Refit(plan, comm, mine, out) as refit:  # with checksums, so staged within a node
            for version in range(3):
                with expecting(refit.comm, counting, near, far, sums_bytes=8 << 10):
                    refit.push(version)
            assert all((a > 0).all() for a in refit.weights.values())


def loads_go_by_memory_within_a_node(comm: Any, counting: Counting) -> None:
    folder, rank, homes = Path(sys.argv[1]) / "checkpoint", comm.rank, comm.reach.homes
    shapes = {f"w{i}": (512, 1024) for i in range(4)}
    values = {
        n: np.random.default_rng(i).standard_normal(s).astype(np.float32)
        for i, (n, s) in enumerate(shapes.items())
    }
    if rank == 0:
        save(folder, {n: (Tiling.whole(s, "float32"), values[n]) for n, s in shapes.items()})
    comm.barrier()
    for strategy in (ShardingStrategy.rowwise(4), ShardingStrategy.replicate(4)):
        tilings = {n: strategy.layout(s, "float32") for n, s in shapes.items()}
        for how in ("own-slice", "node-leader", "root-scatter"):
            plan = plan_load(folder, tilings, 4, strategy=how, nodes=nodes_of(comm))  # type: ignore[arg-type]
            taken = [(r.reader, plan.taken_bytes(r, rank)) for r in plan.reads if r.reader != rank]
            near, far = (need_of(taken, rank, homes, here) for here in (True, False))
            assert bool(MPI.COMM_WORLD.allreduce(far)) == (how == "root-scatter")
            with expecting(comm, counting, near, far):
                arrays = load(folder, plan, comm)
            for name, tiling in tilings.items():
                for box, local in tiling.places(rank, tuple((0, n) for n in tiling.shape)):
                    got, want = (
                        a[tuple(slice(*s) for s in b)]
                        for a, b in ((arrays[name], local), (values[name], box))
                    )
                    assert np.array_equal(got, want)


CHECKS: tuple[Callable[[Any, Counting], None], ...] = (
    execute_goes_by_memory_within_a_node,
    terms_are_folded_within_and_between_nodes,
    reshards_go_by_memory_within_a_node,
    loads_go_by_memory_within_a_node,
)

if __name__ == "__main__":
    counting = Counting()
    with lc.from_mpi(MPI.COMM_WORLD, device="cpu") as comm:
        whole: Any = comm
        assert whole.reach.homes == (0, 0, 1, 1)
        for check in CHECKS:
            check(whole, counting)
            if comm.rank == 0:
                print(check.__name__)
