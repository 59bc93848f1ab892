"""Cases of what programs do with a communicator: moves, ops, reshards, training, odd calls. One table for every way.

The table runs on threads (tests/comm/test_programs.py) and on MPI ranks (tests/comm/test_programs_on_ranks.py).
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import fsdp_kit, mode, odd_calls, reshard_cases
from support.comm_kit import PROGRAMS, Way, case, memory_of_a_node, others, told
from support.comm_kit import run_case as run_contract_case
from support.moves import WAYS, check_move, random_pair, take_way
from support.op_gate import random_action, shards
from support.op_samples import SAMPLES
from support.thread_cases import check_threads

from lowshard import redistribute
from lowshard.comm import Communicator, messages, mpi, share_text
from lowshard.comm.node import fold_views
from lowshard.cost import ClusterProfile
from lowshard.errors import CommError
from lowshard.op import run_action, unsharded
from lowshard.placement import Replicated
from lowshard.reshard import DimSharding, Refit, TensorLayout, build_reshard_plan
from lowshard.reshard.refit import Vote

__all__ = ["PROGRAMS", "odd_calls"]

Rng = np.random.Generator
# What may grow for another reason than a leak: the allocator's pools, what is compiled or imported late.
ALLOWED = {"rss_kib": 8 << 10, "files": 0, "mappings": 16, "threads": 0}


def processes(way: Way) -> bool:
    """Each rank is a process, whose settings are its own."""
    return way.transport in ("node", "mpi")


def on_threads(comm: Communicator) -> bool:
    return comm.transport == "loopback"


def node_of(comm: Communicator) -> Any:
    """Return what ranks of one node beside MPI share; None of other communicators."""
    return getattr(comm._transport, "shared", None)


@case(table=PROGRAMS)
def any_pair_of_layouts_gives_the_bytes_of_slicing(comm: Communicator, rng: Rng) -> None:
    pairs = random.Random(int(rng.integers(1 << 30)))
    with pytest.MonkeyPatch.context() as patch:
        for number in range(1000 if mode.full() else 25):
            src, dst = random_pair(pairs, comm.size)
            if not on_threads(comm):  # which share their settings
                patch.setattr(fold_views, "FOLD_FROM_BYTES", number % 2 << 15)
                take_way(WAYS[number % len(WAYS)], patch.setattr)
            floats = number % 3 == 0 and src.dtype in ("float32", "float64")
            cost = ClusterProfile.default() if number % 5 == 0 else None
            nodes = pairs.choice((None, 1, 2, 3)) if cost else None
            with told(number=number):
                check_move(comm, src, dst, number, "float" if floats else "int", cost, nodes)


@case(others, table=PROGRAMS)
def sharded_ops_equal_whole_ones(comm: Communicator, rng: Rng) -> None:
    done, wanted = 0, 600 if mode.full() else 15
    while done < wanted:
        op = str(rng.choice(sorted(SAMPLES)))
        arrays, args = SAMPLES[op](rng)
        action = random_action(rng, op, arrays, args, "extended")
        if action is None or max(action.mesh.ranks) >= comm.size:
            continue
        parts = [shards(rng, layout, x) for layout, x in zip(action.sources, arrays, strict=True)]
        made = run_action(action, [part.get(comm.rank) for part in parts], comm)
        for part, layout, whole in zip(made, action.outputs, unsharded(op, *arrays, **args), strict=True):
            everywhere = layout.with_placements((Replicated(),) * layout.mesh.ndim)
            came = redistribute(part, layout, everywhere, comm)
            if comm.rank in layout.mesh:
                np.testing.assert_allclose(came, whole, rtol=3e-4, atol=3e-4, err_msg=str(action))
        done += 1


@case(table=PROGRAMS)
def any_reshard_is_slicing_the_whole(comm: Communicator, rng: Rng) -> None:
    for number in range(400 if mode.full() else 15):
        made = reshard_cases.random_case(rng, comm.size)
        apart = comm.size > 1 and not on_threads(comm) and node_of(comm) is None
        if apart and made.way in ("direct", "slots"):
            continue
        sent = comm.traffic.sent_bytes
        moved, came = reshard_cases.run_case(comm, made, number % 2 == 0)
        assert moved == made.plan.sent_bytes(comm.rank)
        assert came == made.plan.received_bytes(comm.rank)
        counted = comm.traffic.sent_bytes - sent  # messages have checksums and padding too
        assert counted == moved or (counted > moved and (made.way == "messages" or node_of(comm) is None))


def holds() -> dict[str, int]:
    """Return what this process holds: memory, open files, mappings, threads."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "rss_kib": int(fields["VmRSS"].split()[0]),
        "files": len(os.listdir("/proc/self/fd")),
        "mappings": Path("/proc/self/maps").read_text().count("\n"),
        "threads": int(fields["Threads"]),
    }


@case(processes, table=PROGRAMS)
def many_refits_leave_nothing_behind(comm: Communicator, rng: Rng) -> None:
    """All ranks are sources and destinations; buffers are two sets by turns."""
    n, count = comm.size, 200 if mode.full() else 50

    def layout(shape: tuple[int, ...], axis: str, dims: Any = None, **by: Any) -> TensorLayout:
        return TensorLayout.sharded(shape, "float32", {axis: (n, 1)}, dims or {}, **by)

    wide, long = (96 * n, 64), (64, 96 * n)
    src = {
        "fc1": layout(wide, "tp", {0: DimSharding(96 * n, n, chunks=2)}, by={0: "tp"}),
        "fc2": layout(long, "tp", {1: "tp"}),
        "norm": layout((777,), "dp"),
        "rows": layout(wide, "tp", {0: "tp"}),  # long runs: read across
    }
    dst = {
        "fc1": layout(wide, "tp", {1: "tp"}),
        "fc2": layout(long, "dp"),
        "norm": layout((777,), "tp", {0: "tp"}),
        "rows": layout(wide, "dp"),
    }
    for shown, checksums in ((False, True), (True, False), (False, False)):
        make: Any = comm.empty if shown else np.empty
        mine = {k: make(x.local_shape(comm.rank), np.float32) for k, x in src.items()}
        out = {k: np.zeros(x.local_shape(comm.rank) or (), np.float32) for k, x in dst.items()}
        before: dict[str, int] = {}
        seen: list[tuple[int, ...]] = []
        with (
            told(shown=shown, checksums=checksums),
            Refit(build_reshard_plan(src, dst), comm, mine, out, checksums=checksums) as refit,
        ):
            for version in range(count):
                for array in mine.values():
                    array[...] = version
                refit.push(version)
                assert refit.version == version
                assert all((a == version).all() for a in refit.weights.values())
                seen.append(tuple(a.ctypes.data for a in refit.weights.values()))
                before = holds() if version == count // 5 else before
            end_s = time.monotonic() + 2  # the thread that drove the last messages ends
            while holds()["threads"] > before["threads"] and time.monotonic() < end_s:
                time.sleep(0.01)
            grown = {name: now - before[name] for name, now in holds().items()}
            assert all(more <= ALLOWED[name] for name, more in grown.items()), grown
            assert set(seen) == set(seen[:2]), "addresses have changed"
            across = share_text(comm, str(any(made._mover.reads_across for made in refit._movers)))
        may_cross = comm.reach.crosses and len(comm.reach.peers) > 1
        assert ("True" in across) == (may_cross and not shown and not checksums)


@case(memory_of_a_node, others, table=PROGRAMS)
def a_rank_that_is_late_to_decide_finds_the_decision_and_writes_to_nothing_else(
    comm: Communicator, rng: Rng
) -> None:
    """Rank 0 decides, closes and uses its memory anew, as a Refit does at its end; then the others decide."""
    own, arrays = comm.split(0), list[Any]()
    vote = Vote(own)
    assert vote.shared
    if comm.rank == 0:
        assert vote.decide(1, True)
        own.close()
        del vote, own
        gc.collect()
        arrays = [comm.empty(8, "int64") for _ in range(200)]
        for array in arrays:
            array[...] = 0
    comm.barrier()
    if comm.rank:
        assert vote.decide(1, True), "the decision was lost"
    comm.barrier()
    assert not any(np.any(array) for array in arrays), "a late decision was written into another array"


@case(table=PROGRAMS)
def every_strategy_trains_as_one_process_does(comm: Communicator, rng: Rng) -> None:
    """Bit for bit, with uneven shapes; rank 0 compares the files with plain NumPy's. A saved half goes on."""
    steps, micro = 10 if mode.full() else 4, 3 if comm.size == 3 else 8
    plain, norms = fsdp_kit.plain_run(steps, micro)
    [folder, *_] = map(Path, share_text(comm, tempfile.mkdtemp() if comm.rank == 0 else ""))
    for name, strategy in fsdp_kit.STRATEGIES.items():
        more: dict[str, Any] = {"communicators": 2, "prefetch": 2, "accumulate": "reduce"}
        for options in ({}, more) if fsdp_kit.fits(name, comm.size) else ():
            path = folder / f"{name}{len(options)}"
            with told(name=name, options=options):
                assert fsdp_kit.train(comm, strategy, range(steps), micro, path, **options).norms == norms
                if comm.rank == 0:
                    fsdp_kit.check_file(path, plain)
    half, saved, end = steps // 2, folder / "half", folder / "end"
    fsdp_kit.train(comm, fsdp_kit.STRATEGIES["full"], range(half), micro, saved)
    fsdp_kit.train(comm, fsdp_kit.STRATEGIES["none"], range(half, steps), micro, end, saved)
    comm.barrier()  # every rank has read the files
    if comm.rank == 0:
        fsdp_kit.check_file(end, plain)
        shutil.rmtree(folder)
    comm.barrier()


@case(others, table=PROGRAMS)
def two_threads_at_once_are_an_error(comm: Communicator, rng: Rng) -> None:
    with comm.split(0) as beside:  # type: ignore[union-attr]
        check_threads(comm, beside.barrier)
        with comm.split(0) as part:  # type: ignore[union-attr]
            check_threads(part, beside.barrier)


@case(memory_of_a_node, others, table=PROGRAMS)
def a_rank_that_can_share_no_more_memory_is_named_on_all(comm: Communicator, rng: Rng) -> None:
    gc.collect()
    comm.barrier()
    kept, groups = [], []
    for size_bytes in (256 << 20, 16 << 20, 1 << 20, 64 << 10, 4 << 10) if comm.rank == 0 else ():
        with contextlib.suppress(CommError):
            while True:
                kept.append(comm.empty(size_bytes, np.uint8))

    def split_until_full() -> None:
        while True:  # there is room where groups of before were
            groups.append(comm.split(0))

    with pytest.raises(CommError, match="rank 0"):
        split_until_full()
    kept.clear()
    comm.split(0)


@case(processes, others, table=PROGRAMS)
def messages_of_more_elements_than_mpi_counts_arrive(comm: Communicator, rng: Rng) -> None:
    with pytest.MonkeyPatch.context() as patch:  # they are small ones here
        patch.setattr(mpi, "_MOST_ELEMS", 100)
        patch.setattr(messages, "SHORT_BYTES", 16)
        patch.setattr(messages, "MOST_BYTES", 64)
        for name in (
            "every_collective_may_be_started",
            "a_group_exchanges_with_all_at_once_and_keeps_the_order_of_each_pair",
            "a_message_of_another_length_in_a_group_is_refused_and_leaves_nothing_behind",
        ):
            run_contract_case(name, comm)
        odd_calls.overlapping(comm, rng)
