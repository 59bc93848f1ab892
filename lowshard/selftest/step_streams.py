"""The step `streams`: calls that are started and waited for later, beside other work."""

from __future__ import annotations

from typing import Any

import numpy as np

from lowshard import comm as lc
from lowshard.comm import Communicator
from lowshard.selftest.comparisons import Tally
from lowshard.selftest.plain_fold import plain_fold
from lowshard.selftest.random_arrays import ordinary
from lowshard.selftest.step_setting import Setting

_ELEMS = 100_003
_TURNS = 10
_WAIT_S = 20.0


def run(setting: Setting, tally: Tally) -> None:
    """Start calls: on threads of this process on a CPU, on a side stream of one NCCL rank on a GPU."""
    if setting.device == "cuda":
        _on_a_side_stream(tally)
        tally.summary = f"{tally.checks} results of one NCCL rank on side streams"
        return
    for found in lc.run_loopback(2, _started, _WAIT_S):
        tally.add(found)
    tally.summary = f"{tally.checks} results of calls that were started and waited for"


def _started(comm: Communicator) -> Tally:
    """Start several calls at once; their results are there after `wait`, in the order they were started in."""
    tally = Tally()
    given = [
        [ordinary((_ELEMS,), "float32", "streams", turn, rank) for rank in range(comm.size)]
        for turn in range(_TURNS)
    ]
    totals = [np.zeros(_ELEMS, np.float32) for _ in given]
    wholes = [np.zeros(_ELEMS * comm.size, np.float32) for _ in given]
    works = []
    for terms, total, whole in zip(given, totals, wholes, strict=True):
        works.append(comm.start.all_reduce(terms[comm.rank], total, order="tree"))
        works.append(comm.start.all_gather(terms[comm.rank], whole))
    for work in works:
        work.wait(timeout_s=_WAIT_S)
        tally.true("Work.done after wait", work.done(), "False")
    for turn, terms in enumerate(given):
        of = f"float32 [{_ELEMS}], started call {turn} on rank {comm.rank}"
        tally.same(f"all_reduce sum tree {of}", totals[turn], plain_fold(terms, "sum", "tree"))
        tally.same(f"all_gather {of}", wholes[turn], np.concatenate(terms))
    # A call that is not started runs after those that were.
    total = np.zeros(_ELEMS, np.float32)
    work = comm.start.all_reduce(given[0][comm.rank], total, order="tree")
    whole = np.zeros(_ELEMS * comm.size, np.float32)
    comm.all_gather(given[1][comm.rank], whole)
    tally.same(f"all_gather after a started all_reduce on rank {comm.rank}", whole, np.concatenate(given[1]))
    work.wait(timeout_s=_WAIT_S)
    tally.same(f"all_reduce started before an all_gather on rank {comm.rank}", total, totals[0])
    return tally


def _on_a_side_stream(tally: Tally) -> None:
    """Queue work, a call, and work that uses its result, on a stream of the caller's; start calls beside it."""
    from lowshard.comm.nccl import nccl_communicator
    from lowshard.comm.nccl_bindings import Binding

    binding = Binding.load()
    xp: Any = binding.xp
    handle = binding.nccl.NcclCommunicator(1, binding.nccl.get_unique_id(), 0)
    with nccl_communicator(handle, 0, 1, binding=binding) as comm:
        for kind in ("non-blocking", "blocking"):
            with xp.cuda.Stream(non_blocking=kind == "non-blocking") as stream:
                for turn in range(_TURNS):
                    given = ordinary((_ELEMS,), "float32", "streams", turn)
                    value, total = xp.asarray(given), xp.zeros(_ELEMS, xp.float32)
                    value *= 2
                    comm.all_reduce(value, total)
                    twice = total * 2
                    stream.synchronize()
                    tally.same(f"all_reduce between two kernels of a {kind} stream", twice, given * 4)
                    value += 1
                    work = comm.start.all_reduce(value, total)
                    expected = given * np.float32(2) + np.float32(1)
                    del value  # the work holds it: the pool must not hand its memory on
                    other = xp.full(_ELEMS, -1.0, xp.float32)
                    work.wait()
                    result = total + 0
                    stream.synchronize()
                    tally.same(f"started all_reduce beside a {kind} stream", result, expected)
                    tally.true(f"Work.done after a {kind} stream was synchronised", work.done(), "False")
                    del other
        given, stream = ordinary((_ELEMS,), "float32", "streams"), xp.cuda.Stream(non_blocking=True)
        with stream:
            value, total = xp.asarray(given) * 2, xp.zeros(_ELEMS, xp.float32)
        comm.all_reduce(value, total, stream=stream)
        stream.synchronize()
        tally.same("all_reduce on a stream that is named", total, given * 2)
