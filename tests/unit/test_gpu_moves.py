"""Redistribution of GPU arrays without a GPU: kernels are the CUDA sources compiled for the host, NCCL a stand-in."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from support.cuda_host import HostCudaEngine, host_cuda_engine
from support.nccl_stand_in import run_stand_in

from lowshard import DeviceMesh, Layout, Sharded, execute, plan_redistribute
from lowshard.comm import Communicator
from lowshard.errors import BufferMismatchError
from lowshard.execute import _argument_error
from lowshard.transfer import exchange_runner, spans

# One dim cut by both axes, in either order, and two dims: what is sent and what comes are many runs each.
SPECS = [
    ((("a", "b"), None, None), (None, None, ("b", "a"))),
    (("a", "b", None), (None, "a", "b")),
    ((None, ("a", "b"), None), ("b", None, "a")),
]


class Engines:
    """An engine of the GPU for each thread, with a count of what it was asked for."""

    def __init__(self) -> None:
        self._local = threading.local()
        self.copies: dict[int, int] = {}

    def __call__(self, *arrays: Any) -> HostCudaEngine:
        ident = threading.get_ident()
        self.copies[ident] = self.copies.get(ident, 0) + 1
        if not hasattr(self._local, "engine"):
            self._local.engine = host_cuda_engine()
        return self._local.engine  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", ["float32", "uint8", "bfloat16"])
@pytest.mark.parametrize("specs", SPECS, ids=str)
def test_boxes_are_packed_and_unpacked_by_one_launch_each(
    specs: tuple[Any, Any], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh, shape = DeviceMesh((2, 2), ("a", "b")), (9, 11, 13)
    src, dst = (Layout.from_spec(mesh, shape, dtype, spec) for spec in specs)
    plan = plan_redistribute(src, dst)
    whole = np.random.default_rng(1).integers(0, 256, (*shape, src.numpy_dtype.itemsize), np.uint8)
    values = whole.view(src.numpy_dtype)[..., 0]

    def part(layout: Layout, rank: int) -> Any:
        return np.ascontiguousarray(values[tuple(slice(*span) for span in layout.box(rank))])

    engines = Engines()

    def work(comm: Communicator) -> tuple[Any, int]:
        out = np.zeros(dst.local_shape(comm.rank), dst.numpy_dtype)
        execute(plan, part(src, comm.rank), comm, out)
        return out, engines.copies.get(threading.get_ident(), 0)

    monkeypatch.setattr(exchange_runner, "is_gpu", lambda array: True)
    monkeypatch.setattr(spans, "engine_for", engines)
    for rank, (out, copies) in enumerate(run_stand_in(4, work)):
        assert out.tobytes() == part(dst, rank).tobytes()
        steps = len(plan.steps)
        assert 0 < copies <= 3 * steps, copies  # what is sent, what stays, what has come


class Module:
    """As far as a check of arguments looks at CuPy."""

    __name__ = "cupy"

    def __init__(self) -> None:
        self.ndarray = type("ndarray", (), {"__module__": "cupy", "__cuda_array_interface__": None})

    def array(self, at: int, shape: tuple[int, ...]) -> Any:
        made = self.ndarray()
        strides = tuple(4 * int(np.prod(shape[dim + 1 :])) for dim in range(len(shape)))
        facts = {
            "shape": shape, "strides": strides, "dtype": np.dtype(np.float32), "size": int(np.prod(shape)),
            "nbytes": 4 * int(np.prod(shape)),
            "flags": type("Flags", (), {"c_contiguous": True}), "data": type("Data", (), {"ptr": at}),
        }  # fmt: skip
        made.__dict__.update(facts)
        return made


@pytest.mark.parametrize(
    ("at", "overlaps"), [(1000, True), (1188, True), (1192, False), (808, False), (812, True)]
)
def test_a_result_that_overlaps_its_source_is_refused_on_a_gpu_too(at: int, overlaps: bool) -> None:
    mesh, xp = DeviceMesh((2,), ("x",)), Module()
    rows = Layout(mesh, (8, 12), "float32", (Sharded(0),))
    plan = plan_redistribute(rows, Layout(mesh, (8, 12), "float32", (Sharded(1),)))
    comm: Any = type("Comm", (), {"xp": xp, "rank": 0, "size": 2})
    found = _argument_error(plan, xp.array(1000, (4, 12)), comm, xp.array(at, (8, 6)), None)
    assert (type(found) is BufferMismatchError) == overlaps, found
    assert not overlaps or "out overlaps local" in str(found)
