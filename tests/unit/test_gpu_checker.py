"""The GPU checker finds each fault at a random place of a program that is right elsewhere, and none without one."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from support import mode
from support.checked_gpu import checked_gpu, checker_env

PLACES = 20
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not on PATH")

# Of each fault the report that is expected, and a text that is run many times over. A line with `right:` is left out
# where the fault is planted, one with `wrong:` is run only there, and `wrong` says where it is.
BEGIN = """
import cupy, numpy as np
from cupy import ones
from lowshard.kernels import BoxTable, pack
from lowshard.kernels.cuda.cuda_engine import device_engine
from lowshard.kernels.runs import whole_array_runs
F, TO_DEVICE, TO_HOST, runtime = "float32", 1, 2, cupy.cuda.runtime
one, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
raw = np.zeros(3 * 4096, np.uint8)
slot = raw[-raw.ctypes.data % 4096 :][: 2 * 4096].view(F)
runtime.hostRegister(slot.ctypes.data, slot.nbytes, 0)
settle = cupy.cuda.Device().synchronize
"""
END = "runtime.hostUnregister(slot.ctypes.data)"
FAULTS = {
    "race between streams": ("race: cupy's multiply .* nothing orders", """
        with one: x = ones(1000, F)
        right: other.wait_event(one.record())
        with other: x *= 2"""),
    "event recorded too soon": ("race: cupy's multiply .* cupy's add", """
        with one: x = ones(1000, F)
        made = one.record()
        with one: x += 1
        right: made = one.record()
        other.wait_event(made)
        with other: x *= 2"""),
    "memory handed on too soon": ("race: cupy's zeros .* cupy's add", """
        with one: x = ones(3000, F)
        other.wait_event(one.record())
        with other: x += 1
        right: one.wait_event(other.record())
        del x
        with one: cupy.zeros(3000, F)"""),
    "use after free": ("which was freed before", """
        with one: x = ones(100, F)
        at = x.data.ptr
        wrong: del x
        runtime.memcpyAsync(slot.ctypes.data, at, 400, TO_HOST, one.ptr)"""),
    "out of bounds": ("out of bounds", """
        with one: cupy.ndarray(100 + wrong, F, ones(100, F).data).fill(2)"""),
    "kernel out of bounds": ("kernel copy_16 reads .* out of bounds", """
        with one: x = ones((64, 128), F)
        wrong: with one: x = cupy.ndarray((64, 128), F, ones(100, F).data)
        with one: pack(x, BoxTable((64, 128), (((0, 64), (0, 64)),)))"""),
    "unaligned access": ("not aligned", """
        with one: cupy.zeros(65, 'uint8')[wrong : wrong + 64].view(F).fill(1)"""),
    "threads on one byte": ("two threads of kernel scatter_4 write byte", """
        with one:
            places = cupy.asarray(np.array([1, 2, 3, 4 - wrong]))
            runs = whole_array_runs((64,), (4,), (4,), 4, 4)
            device_engine(0).scatter(cupy.zeros(64, 'int32'), ones(4, 'int32'), places, runs)"""),
    "host reads a slot too soon": ("the host reads page-locked memory", """
        with one: x = ones(100, F)
        runtime.memcpyAsync(slot.ctypes.data, x.data.ptr, 400, TO_HOST, one.ptr)
        right: one.synchronize()
        float(slot[:100].sum())"""),
    "host writes a slot too soon": ("the host writes page-locked memory", """
        with one: x = ones(1500, F)
        runtime.memcpyAsync(x.data.ptr, slot.ctypes.data, 6000, TO_DEVICE, one.ptr)
        right: one.synchronize()
        slot[:1500] += 1"""),
    "destroyed event is queried": ("event .* was destroyed", """
        with one: ones(10)
        event = one.record()
        at = event.ptr
        wrong: del event
        runtime.eventQuery(at)"""),
    "upload within a capture": ("upload of 32 bytes within a capture", """
        with one:
            x, more = cupy.zeros(8, F), cupy.asarray(np.ones(8, F))
            one.begin_capture()
            wrong: more = cupy.asarray(np.ones(8, F))
            x += more
            one.end_capture().launch()"""),
    "replay of freed memory": ("cupy's add reads .* which was freed", """
        with one:
            x, more = cupy.zeros(8, F), ones(8, F)
            one.begin_capture()
            x += more
            graph = one.end_capture()
            wrong: del more
            wrong: more = ones(8, F)  # at the same address
            graph.launch()"""),
}  # fmt: skip


# Each rank, of two that are threads, runs these.
RANK_BEGIN = """
import cupy
nccl, stream, INT64, MAX = cupy.cuda.nccl, cupy.cuda.Stream(non_blocking=True), 4, 2
comm = nccl.NcclCommunicator(2, unique, rank)
with stream:
    arrays = cupy.arange(8), cupy.zeros(8, "int64")
source, target = (array.data.ptr for array in arrays)
def reduce(sent, count=8, kind=INT64, op=0):
    comm.allReduce(sent, target, count, kind, op, stream.ptr)
settle = stream.synchronize
"""
RANK_END = "comm.ended or (comm.abort() if is_wrong else comm.destroy())"
RANK_FAULTS = {
    "unbalanced group": ("within a group of NCCL calls that is not ended", """
        nccl.groupStart()
        reduce(source)
        right: nccl.groupEnd()"""),
    "group ended twice": ("groupEnd without groupStart", """
        reduce(source)
        wrong: nccl.groupEnd()"""),
    "counts differ": (r"\['allReduce', [78], 'int64', 0\] on rank", """
        reduce(source, count=8 - wrong * rank)"""),
    "ops differ": (r"\['allReduce', 8, 'int64', [02]\] on rank", """
        reduce(source, op=wrong * rank * MAX)"""),
    "types differ": (r"\['allReduce', 8, 'u?int64', 0\] on rank", """
        reduce(source, kind=INT64 + wrong * rank)"""),
    "calls in another order": (r"\['all(Reduce|Gather)', .* on rank", """
        if wrong * rank: reduce(source)
        comm.allGather(source, target, 4, INT64, stream.ptr)
        if not wrong * rank: reduce(source)"""),
    "message of another length": (r"\['message', [78], 'int64'\] on rank", """
        (comm.send if rank else comm.recv)(target, 8 - wrong * rank, INT64, 1 - rank, stream.ptr)"""),
    "overlap that is not in place": ("its arrays overlap", """
        reduce(target + 8 * wrong, count=7)"""),
    "group on two streams": ("on several streams", """
        nccl.groupStart()
        comm.send(source, 8, INT64, 1 - rank, stream.ptr)
        comm.recv(target, 8, INT64, 1 - rank, 0 if wrong else stream.ptr)
        nccl.groupEnd()"""),
    "call after destroy": ("check_async_error on a communicator after destroy", """
        reduce(source)
        stream.synchronize()
        wrong: comm.destroy()
        comm.check_async_error()"""),
}  # fmt: skip


@pytest.fixture
def cupy() -> Iterator[Any]:
    before = sys.modules.get("cupy")
    with checked_gpu() as module:
        yield module
    assert sys.modules.get("cupy") is before


def run(begin: str, text: str, end: str, wrong: int, **names: Any) -> None:
    """Run a program many times over, at one place with its fault; none where that is -1."""
    exec(begin, names)
    try:
        for place in range(PLACES):
            names["wrong"] = place == wrong
            kept, gone = ("wrong: ", "right: ") if place == wrong else ("right: ", "wrong: ")
            lines = [line.replace(kept, "") for line in dedent(text).splitlines() if gone not in line]
            exec(compile("\n".join(lines), "<planted>", "exec"), names)
            names["settle"]()
    except names["cupy"].checker.Misuse:
        assert wrong >= 0
    exec(end, names | {"is_wrong": wrong >= 0})


@needs_compiler
@pytest.mark.parametrize("name", [*FAULTS, *RANK_FAULTS])
def test_a_planted_fault_is_found(name: str, cupy: Any) -> None:
    pattern, text = (FAULTS | RANK_FAULTS)[name]
    for wrong in (-1, int(mode.rng(f"gpu checker {name}").integers(PLACES))):
        assert cupy.checker.reports() == []
        if name in FAULTS:
            run(BEGIN, text, END, wrong)
            continue
        unique = cupy.cuda.nccl.get_unique_id()
        with ThreadPoolExecutor(2) as pool:
            of_rank = partial(pool.submit, run, RANK_BEGIN, text, RANK_END, wrong, unique=unique)
            for rank in [of_rank(rank=0), of_rank(rank=1)]:
                rank.result()
    assert any(re.search(pattern, found) for found in cupy.checker.reports()), cupy.checker.reports()
    assert {"allocations", "host_waits"} <= set(cupy.checker.counts())


PROGRAM = """
with one: packed = pack(ones((64, 128), F), BoxTable((64, 128), (((0, 64), (0, 64)),)))
with other: packed += 1
settle()
print(float(packed.sum()))
"""


@needs_compiler
@pytest.mark.parametrize("way", ["on", "off"])
def test_a_process_writes_its_reports_and_counts(way: str, tmp_path: Path) -> None:
    report, counts = tmp_path / "report", tmp_path / "counts"
    env = {**os.environ, **checker_env(report, counts, LOWSHARD_CHECKER=way)}
    command = [sys.executable, "-c", BEGIN + PROGRAM + END]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    found = json.loads(counts.read_text())
    assert (found["launches"], found["uploads"]) == (1, 1)  # of the kernel's table
    assert report.exists() == ("host_waits" in found) == (way == "on")
    if way == "on":
        (line,) = report.read_text().splitlines()
        assert re.match(r"gpu checker: race: cupy's add on .*<string>:15.*kernel copy_16", line)
        assert line in done.stderr
        assert float(done.stdout) == 2 * 64 * 64
