"""CUDA graphs of NCCL calls, and streams that a call is given, on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from support.comm_kit import refused, same
from support.gpu import REASON

from lowshard import comm as lc
from lowshard.comm import Communicator
from lowshard.comm.nccl import nccl_communicator
from lowshard.comm.nccl_bindings import Binding
from lowshard.errors import CaptureError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(REASON is not None, reason=f"NCCL cannot be used here: {REASON}"),
]


@pytest.fixture
def comm() -> Iterator[Communicator]:
    """A communicator of one rank."""
    nccl = Binding.load().nccl
    with nccl_communicator(
        nccl.NcclCommunicator(1, nccl.get_unique_id(), 0), 0, 1, lc.loopback(1)[0]
    ) as made:
        yield made


def test_a_graph_repeats_a_captured_call_on_new_values(comm: Communicator) -> None:
    cupy, stream = comm.xp, Binding.load().xp.cuda.Stream(non_blocking=True)
    with stream:
        value, total = cupy.arange(8, dtype=cupy.float32), cupy.zeros(8, cupy.float32)
        comm.all_reduce(value, total)
        stream.synchronize()
        stream.begin_capture()
        comm.all_reduce(value, total)
        refused(lambda: comm.start.all_reduce(value, total), CaptureError, "start.all_reduce")
        refused(comm.barrier, CaptureError, "barrier")
        graph = stream.end_capture()
        value += 1
        graph.launch(stream)
        stream.synchronize()
    same(total, np.arange(1, 9, dtype=np.float32))
    del graph
    comm.barrier()


def test_a_call_is_queued_on_the_stream_it_is_given(comm: Communicator) -> None:
    cupy, stream = comm.xp, Binding.load().xp.cuda.Stream(non_blocking=True)
    value, total = cupy.arange(8, dtype=cupy.float32), cupy.zeros(8, cupy.float32)
    cupy.cuda.get_current_stream().synchronize()
    for given in (stream, stream.ptr):
        with stream:
            value += 1
        comm.all_reduce(value, total, stream=given)
        stream.synchronize()
        same(total, value.get())
