"""Arrays on a GPU that say that they are read-only are sources only, though CuPy's view of them can be written."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from lowshard import DeviceMesh, Layout, Replicated, Sharded, redistribute
from lowshard import comm as lc
from lowshard.errors import BufferMismatchError
from lowshard.foreign_array import READ_ONLY, view_in_call, view_of


class Exported:
    """An array of a library with CUDA's array interface alone."""

    def __init__(self, read_only: bool) -> None:
        self.__cuda_array_interface = {
            "shape": (4,), "typestr": "<f4", "data": (1 << 40, read_only), "strides": None, "version": 3, "stream": 1,
        }  # fmt: skip

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.__cuda_array_interface


class Seen:
    """What CuPy makes of one."""


@pytest.fixture(autouse=True)
def cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("cupy")
    module.asarray = lambda array: Seen()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", module)


@pytest.mark.parametrize("view", [view_of, view_in_call])
def test_what_is_read_only_is_no_result(view: Any) -> None:
    for read_only, writes in ((False, False), (False, True), (True, False)):
        assert type(view(Exported(read_only), "x", writes)) is Seen
    with pytest.raises(BufferMismatchError, match="x is written to, but the array is read-only"):
        view(Exported(True), "x", True)


def test_calls_refuse_it_as_a_result_and_take_it_for_a_source() -> None:
    mesh = DeviceMesh((2,), ("x",))
    src, dst = (Layout(mesh, (4,), "float32", (placed,)) for placed in (Sharded(0), Replicated()))

    def job(comm: lc.Communicator) -> list[bool]:
        part, constant = np.zeros(2, np.float32), Exported(True)
        said = []
        calls: tuple[Callable[[], object], ...] = (
            lambda: comm.all_gather(part, constant),
            lambda: comm.start.all_gather(part, constant).wait(),
            lambda: redistribute(part, src, dst, comm, constant),
            lambda: comm.all_gather(constant, np.zeros(8, np.float32)),
        )
        for call in calls:
            with pytest.raises(BufferMismatchError) as caught:
                call()
            said.append(READ_ONLY in str(caught.value))
        return said

    # The last is refused as well, since it does not lie in host memory.
    assert lc.run_loopback(2, job, timeout_s=20.0) == [[True, True, True, False]] * 2
