"""What the tests of the GPU path share: whether there is a GPU, ranks that are threads on one, what they ask of it.

A test asks for CuPy by the fixture `cupy` of tests/gpu: the real one where it sees a GPU, else one that checks.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from support.checked_gpu import checker_env

from lowshard import comm as lc
from lowshard.comm import Communicator
from lowshard.comm.nccl import nccl_communicator
from lowshard.comm.nccl_bindings import Binding
from lowshard.comm.staged import staged_communicator

T = TypeVar("T")

SHARED_GPU = {
    "CUDA_VISIBLE_DEVICES": "0",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",  # it cannot be shared
    "NCCL_MAX_CTAS": "2",  # all ranks' blocks must be resident at once
    "NCCL_RUNTIME_CONNECT": "0",
}
"""Environment of ranks that share GPU 0; needs NCCL 2.30.3."""

_SPIN = r"""
extern "C" __global__ void spin(const long long ns) {
    long long begun, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begun));
    do { asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); } while (now - begun < ns);
}
"""


@cache
def why_no_gpu() -> str | None:
    """Return why CuPy has no GPU here, or None. Asked before a checker is put in CuPy's place."""
    try:
        import cupy

        count = int(cupy.cuda.runtime.getDeviceCount())
    except (ImportError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None if count else "CuPy sees no CUDA device"


needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="g++, which builds the kernels, is not on PATH"
)


def busy(cupy: Any, seconds: float) -> None:
    """Keep the current stream busy for a while, with one thread of the GPU."""
    cupy.RawKernel(_SPIN, "spin")((1,), (1,), (cupy.int64(int(seconds * 1e9)),))


class Recorded:
    """An NCCL communicator that notes each call. `errors` has what the next call of a name raises instead, `""` of any;
    one that is `still` does nothing, as where other ranks never come."""

    def __init__(self, raw: Any, still: bool = False) -> None:
        self.raw, self.still, self.errors = raw, still, dict[str, BaseException]()
        self.calls: list[tuple[Any, ...]] = []
        """(name, arguments...) of all that was asked, in order."""

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self.calls.append((name, *args))
            error = self.errors.pop(name, None) or self.errors.pop("", None)
            if error is not None:
                raise error
            if self.still and (name in MOVES or name == "destroy"):
                return None
            found = getattr(self.raw, name)(*args)
            return Recorded(found) if name == "commSplit" and found is not None else found

        call.__name__ = name
        setattr(self, name, call)  # one method is one object
        return call

    @property
    def ended(self) -> str:
        """How it was ended: "abort", "destroy", or "" while it is open."""
        return next((name for name, *_ in self.calls if name in ("abort", "destroy")), "")

    def moved(self, *names: str) -> list[tuple[Any, ...]]:
        """Return the calls that move bytes, or those of some names."""
        return [call for call in self.calls if call[0] in (names or MOVES)]


MOVES = ("allReduce", "reduceScatter", "allGather", "broadcast", "send", "recv")


def recorded(comm: Communicator) -> Recorded:
    """Return the NCCL communicator of one of ours."""
    assert isinstance(comm._transport._handle, Recorded)  # type: ignore[attr-defined]
    return comm._transport._handle  # type: ignore[attr-defined]


def alone(device: int = 0, **options: Any) -> Communicator:
    """Return a communicator over NCCL of one rank; options are those of `nccl_communicator`."""
    binding = Binding.load()
    handle: Any = Recorded(binding.nccl.NcclCommunicator(1, binding.nccl.get_unique_id(), 0))
    if device:
        handle.device_id = lambda: device
    comm = nccl_communicator(handle, 0, 1, **{"binding": binding, **options})
    handle.calls.clear()
    return comm


def alone_staged(**options: Any) -> Communicator:
    """Return a staged communicator of one rank; options are those of `staged_communicator`."""
    return staged_communicator(lc.loopback(1)[0], **{"binding": Binding.load(with_nccl=False), **options})


def run_nccl(
    size: int, function: Callable[[Communicator], T], *, control: bool = True, still: bool = False,
    timeout_s: float = 60.0, **options: Any,
) -> list[T]:  # fmt: skip
    """Run a function in threads, each a rank on a stream of its own, over NCCL communicators that share a GPU.

    With loopback ones beside them unless `control` is off; options are those of `nccl_communicator`. On a real GPU a
    test of several ranks is left out: one that allocates, or loads a kernel of CuPy's, waits for the other's kernel,
    which waits for it. There MPI ranks do the same, and the selftest's step `threads`, which loads all that it needs.
    """
    if size > 1 and why_no_gpu() is None:
        pytest.skip("ranks of one process that share a real GPU may wait for each other; MPI ranks do it")
    unique: list[bytes] = []

    def rank(host: Communicator) -> T:
        binding = Binding.load()
        binding.select(0)
        if host.rank == 0:
            unique.append(binding.nccl.get_unique_id())
        host.barrier()
        # Apart from the default stream: on one stream a kernel would wait for those of other ranks.
        with binding.xp.cuda.Stream(non_blocking=True) as stream:
            handle = Recorded(binding.nccl.NcclCommunicator(size, unique[0], host.rank), still)
            made = {"binding": binding, "timeout_s": timeout_s, **options}
            comm = nccl_communicator(handle, host.rank, size, host if control else None, **made)
            handle.calls.clear()
            with comm:
                result = function(comm)
                stream.synchronize()
                return result

    with pytest.MonkeyPatch.context() as patch:
        for name, value in SHARED_GPU.items():
            patch.setenv(name, value)
        return lc.run_loopback(size, rank, timeout_s)


def run_staged(
    size: int, function: Callable[[Communicator], T], *, slot_bytes: int = 1 << 20, timeout_s: float = 60.0
) -> list[T]:
    """Run a function in threads, each a rank on a stream of its own, over staged communicators that share a GPU."""

    def rank(host: Communicator) -> T:
        binding = Binding.load(with_nccl=False)
        binding.select(0)
        comm = staged_communicator(host, binding, slot_bytes=slot_bytes)
        with binding.xp.cuda.Stream(non_blocking=True) as stream, comm:
            result = function(comm)
            stream.synchronize()
            return result

    return lc.run_loopback(size, rank, timeout_s)


def on_gpu(comm: Communicator, *values: Any) -> Any:
    """Return arrays of the host as new ones on the GPU; one alone as itself."""
    made = [comm.xp.asarray(np.asarray(value)) for value in values]
    return made[0] if len(made) == 1 else made


class Answers:
    """What CUDA answers where it is asked whether something is done: `status`, or the truth where that is None."""

    NEVER, ILLEGAL_ADDRESS = 600, 700

    def __init__(self, cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.status: int | None = None
        self.of_threads: dict[int, int] = {}
        """What single threads are answered."""
        runtime = cupy.cuda.runtime
        for name in ("eventQuery", "streamQuery"):
            monkeypatch.setattr(runtime, name, self._answer(getattr(runtime, name)))

    def _answer(self, real: Callable[[int], int]) -> Callable[[int], int]:
        def query(at: int) -> int:
            given = self.of_threads.get(threading.get_ident(), self.status)
            return real(at) if given is None else given

        return query


@contextmanager
def host_waits(cupy: Any) -> Iterator[list[str]]:
    """Note each time that the host waits for a stream, an event or the device."""
    found: list[str] = []
    runtime = cupy.cuda.runtime

    def noting(name: str, real: Callable[..., None]) -> Callable[..., None]:
        return lambda *args: (found.append(name), real(*args))[1]  # type: ignore[func-returns-value]

    with pytest.MonkeyPatch.context() as patch:
        for name in ("streamSynchronize", "eventSynchronize", "deviceSynchronize"):
            patch.setattr(runtime, name, noting(name, getattr(runtime, name)))
        yield found


def ranks_env(folder: Path) -> dict[str, str]:
    """Return the environment of ranks that share a GPU, the real one or the checker's."""
    if why_no_gpu() is None:
        return SHARED_GPU
    return SHARED_GPU | checker_env(folder / "reports", folder / "counts")


def did(cupy: Any, *what: str) -> None:
    """Demand that the checker, where it is one, has counted some of each kind of work; print how much."""
    if hasattr(cupy, "checker"):
        counted(cupy.checker.counts(), what)


def counted(counts: Mapping[str, int], what: Sequence[str]) -> None:
    found = {name: counts[name] for name in what}
    print(found)
    assert all(found.values()), found


def nothing_told(folder: Path, *what: str) -> None:
    """Demand that the checker has nothing to tell of processes, and that they did something; print how much."""
    if why_no_gpu() is None:
        return
    told = folder / "reports"
    assert not told.exists() or not told.read_text(), told.read_text()
    rows = [json.loads(line) for line in (folder / "counts").read_text().splitlines()]
    counted({name: sum(row.get(name, 0) for row in rows) for name in what}, what)
