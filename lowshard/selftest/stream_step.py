"""The step `streams`: calls that are started and waited for later, beside other work."""

from __future__ import annotations

from typing import Any

import numpy as np

from lowshard import comm as lc
from lowshard.comm import Communicator
from lowshard.comm.nccl import nccl_communicator
from lowshard.comm.nccl_bindings import Binding
from lowshard.selftest.arrays import ordinary
from lowshard.selftest.collective_cases import CollectiveCalls
from lowshard.selftest.comparisons import Tally
from lowshard.selftest.steps import Setting

_ELEMS = 100_003
_TURNS = 10
_WAIT_S = 20.0


def run(setting: Setting, tally: Tally) -> None:
    """Start calls: on threads of this process on a CPU, on a side stream of one NCCL rank on a GPU."""
    if setting.device == "cuda":
        _on_a_side_stream(tally)
    else:
        for found in lc.run_loopback(2, _started, _WAIT_S):
            tally.add(found)
    of = (
        "one NCCL rank on side streams"
        if setting.device == "cuda"
        else "calls that were started and waited for"
    )
    tally.summary = f"{tally.checks} results of {of}"


def _started(comm: Communicator) -> Tally:
    """Start every call, with one that is not started among them, and look at the results once all are over."""
    tally = Tally()
    calls, works = [], []
    for elems in (1, 1003, _ELEMS):
        made = CollectiveCalls(comm, "float32", elems, in_place=elems == 1003)
        calls += [*made.moves(range(comm.size)), *made.reductions("sum", "tree")]
    for number, call in enumerate(calls):
        if number % 7 == 6:
            getattr(comm, call.name)(*call.args)  # after those that were started
            call.check(tally.same)
        else:
            works.append((getattr(comm.start, call.name)(*call.args), call))
    for work, call in works:
        work.wait(timeout_s=_WAIT_S)
        tally.true(f"Work.done after wait, {call.what}", work.done(), "False")
        call.check(tally.same)
    return tally


def _on_a_side_stream(tally: Tally) -> None:
    """Queue work, a call, and work that uses its result, on a stream of the caller's; start calls beside it."""
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
