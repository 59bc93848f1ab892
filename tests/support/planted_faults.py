"""Programs that use a GPU rightly, or with one fault: what the GPU checker must find.

Each has the report that is expected of the fault, and a text that is run many times over. A line that begins with
`right:` is left out where the fault is planted, one with `wrong:` is run only there, and `wrong` says where it is.
"""

from __future__ import annotations

from textwrap import dedent
from types import CodeType
from typing import Any

import numpy as np

from lowshard.kernels import BoxTable, pack
from lowshard.kernels.cuda.cuda_engine import device_engine
from lowshard.kernels.runs import whole_array_runs

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
    "replay of freed memory": ("a graph that is replayed, which was freed", """
        with one:
            x, more = cupy.zeros(8, F), ones(8, F)
            one.begin_capture()
            x += more
            graph = one.end_capture()
            wrong: del more
            wrong: more = ones(8, F)  # at the same address
            graph.launch()"""),
}  # fmt: skip

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
"""Each rank, of two that are threads, runs these."""


def compiled(text: str, is_right: bool) -> CodeType:
    kept, gone = ("right: ", "wrong: ")[:: 1 if is_right else -1]
    lines = [line.replace(kept, "") for line in dedent(text).splitlines() if gone not in line]
    return compile("\n".join(lines), "<planted>", "exec")


def names_of(cupy: Any) -> dict[str, Any]:
    """Return what programs use: two streams, page-locked memory."""
    raw = np.zeros(3 * 4096, np.uint8)
    slot = raw[-raw.ctypes.data % 4096 :][: 2 * 4096].view(np.float32)
    one, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    return {
        "cupy": cupy, "runtime": cupy.cuda.runtime, "ones": cupy.ones, "F": "float32", "one": one, "other": other,
        "raw": raw, "slot": slot, "TO_DEVICE": 1, "TO_HOST": 2, "settle": cupy.cuda.Device().synchronize, "np": np,
        "BoxTable": BoxTable, "pack": pack, "device_engine": device_engine, "whole_array_runs": whole_array_runs,
    }  # fmt: skip


def names_of_rank(cupy: Any, unique: bytes, rank: int) -> dict[str, Any]:
    """Return what programs of a rank use: a stream, a communicator and two arrays of eight numbers."""
    nccl, stream = cupy.cuda.nccl, cupy.cuda.Stream(non_blocking=True)
    comm = nccl.NcclCommunicator(2, unique, rank)
    with stream:
        arrays = cupy.arange(8), cupy.zeros(8, "int64")
    source, target = (array.data.ptr for array in arrays)

    def reduce(sent: int, count: int = 8, kind: int = 4, op: int = 0) -> None:
        comm.allReduce(sent, target, count, kind, op, stream.ptr)

    return locals() | {"INT64": 4, "MAX": 2, "settle": stream.synchronize}
