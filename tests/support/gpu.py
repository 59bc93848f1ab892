"""What tests of the GPU path share: whether there is a GPU, ranks that are threads, what they ask of it.

A test asks for CuPy by the fixture `cupy` of tests/gpu: the real one where there is a GPU, else a checker.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from support import checked_gpu

from lowshard import comm as lc
from lowshard.comm import Communicator
from lowshard.comm.nccl import nccl_communicator
from lowshard.comm.nccl_bindings import Binding
from lowshard.comm.staged import staged_communicator

T = TypeVar("T")

SHARED_GPU = checked_gpu.SHARED_GPU | {"CUDA_VISIBLE_DEVICES": "0", "NCCL_RUNTIME_CONNECT": "0"}
"""Environment of ranks that share GPU 0; needs NCCL 2.30.3."""

_SPIN = r"""extern "C" __global__ void spin(const long long ns) {
    long long begun, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begun));
    do { asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); } while (now - begun < ns);
}"""


@cache
def has_gpu() -> bool:
    """Say whether CuPy has a GPU here. Asked before a checker is put in CuPy's place."""
    try:
        import cupy

        return int(cupy.cuda.runtime.getDeviceCount()) > 0
    except (ImportError, RuntimeError):
        return False


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++, for kernels, is not on PATH")


def busy(cupy: Any, seconds: float) -> None:
    """Keep the current stream busy for a while, with one thread of the GPU."""
    cupy.RawKernel(_SPIN, "spin")((1,), (1,), (cupy.int64(int(seconds * 1e9)),))


MOVES = ("allReduce", "reduceScatter", "allGather", "broadcast", "send", "recv")


class Recorded:
    """An NCCL communicator that notes each call, a name and arguments, in `calls`; it raises what `errors`
    has of a name. One that is `still` does nothing, as where other ranks never come."""

    def __init__(self, raw: Any, still: bool = False) -> None:
        self.raw, self.still, self.errors = raw, still, dict[str, BaseException]()
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self.calls.append((name, *args))
            if name in self.errors:
                raise self.errors.pop(name)
            if self.still and name in (*MOVES, "destroy"):
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

    def moved(self) -> list[tuple[Any, ...]]:
        """Return the calls that move bytes."""
        return [call for call in self.calls if call[0] in MOVES]


def recorded(comm: Communicator) -> Any:
    """Return the NCCL communicator of one of ours."""
    return comm._transport._handle  # type: ignore[attr-defined]


def alone(device: int = 0, **options: Any) -> Communicator:
    """Return a communicator over NCCL of one rank; options are those of `nccl_communicator`."""
    binding = Binding.load()
    handle: Any = Recorded(binding.nccl.NcclCommunicator(1, binding.nccl.get_unique_id(), 0))
    if device:
        handle.device_id = lambda: device
    return nccl_communicator(handle, 0, 1, **{"binding": binding, **options})


def alone_staged(**options: Any) -> Communicator:
    """Return a staged communicator of one rank; options are those of `staged_communicator`."""
    return staged_communicator(lc.loopback(1)[0], **{"binding": Binding.load(with_nccl=False), **options})


def run_nccl(
    size: int, function: Callable[[Communicator], T], control: bool = True, still: bool = False,
    timeout_s: float = 60.0, **options: Any,
) -> list[T]:  # fmt: skip
    """Run a function in threads, each a rank over NCCL; options are those of `nccl_communicator`.

    With loopback communicators beside them unless `control` is off. On a real GPU several ranks are left out:
    one that loads a kernel waits for the other's, which waits for it. There MPI ranks do the same, and the
    step `threads` of the selftest, which loads all that it needs.
    """
    if size > 1 and has_gpu():
        pytest.skip("ranks of one process that share a real GPU may wait for each other; MPI ranks do it")
    unique: list[bytes] = []

    def make(host: Communicator, binding: Binding) -> Communicator:
        if host.rank == 0:
            unique.append(binding.nccl.get_unique_id())
        host.barrier()
        handle: Any = Recorded(binding.nccl.NcclCommunicator(size, unique[0], host.rank), still)
        made = {"binding": binding, "timeout_s": timeout_s, **options}
        return nccl_communicator(handle, host.rank, size, host if control else None, **made)

    return _run(size, function, make, True, timeout_s)


def run_staged(size: int, function: Callable[[Communicator], T]) -> list[T]:
    """Run a function in threads, each a rank over staged communicators."""
    return _run(size, function, staged_communicator, False)


def _run(
    size: int, function: Callable[[Communicator], T], make: Any, nccl: bool, limit_s: float = 60.0
) -> list[T]:
    def rank(host: Communicator) -> T:
        binding = Binding.load(with_nccl=nccl)
        binding.select(0)
        # Apart from the default stream: on one stream a kernel would wait for those of other ranks.
        with binding.xp.cuda.Stream(non_blocking=True) as stream, make(host, binding) as comm:
            result = function(comm)
            stream.synchronize()
            return result

    return lc.run_loopback(size, rank, limit_s)


def on_gpu(comm: Communicator, *values: Any) -> Any:
    """Return arrays of the host as new ones on the GPU; one alone as itself."""
    made = [comm.xp.asarray(np.asarray(value)) for value in values]
    return made[0] if len(made) == 1 else made


class Answers:
    """What CUDA answers where it is asked whether something is done: `status`; None: the truth."""

    NEVER, ILLEGAL_ADDRESS = 600, 700

    def __init__(self, cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.status: int | None = None
        self.of_threads: dict[int, int] = {}
        for name in ("eventQuery", "streamQuery"):
            real = getattr(cupy.cuda.runtime, name)
            monkeypatch.setattr(cupy.cuda.runtime, name, partial(self._query, real))

    def _query(self, real: Callable[[int], int], at: int) -> int:
        given = self.of_threads.get(threading.get_ident(), self.status)
        return real(at) if given is None else given


@contextmanager
def host_waits(cupy: Any) -> Iterator[list[str]]:
    """Note each time that the host waits for a stream, an event or the device."""
    found, runtime = list[str](), cupy.cuda.runtime
    with pytest.MonkeyPatch.context() as patch:
        for name in ("streamSynchronize", "eventSynchronize", "deviceSynchronize"):
            real: Any = getattr(runtime, name)
            patch.setattr(runtime, name, lambda *at, name=name, real=real: (found.append(name), real(*at)))
        yield found


@contextmanager
def checked_ranks(folder: Path, *what: str) -> Iterator[dict[str, str]]:
    """Give the environment of processes that share a GPU, the real one or the checker's.

    The checker, where it is one, has nothing to tell of them then, and has counted some of each kind of work.
    """
    if has_gpu():
        yield SHARED_GPU
        return
    told, counts = folder / "reports", folder / "counts"
    yield SHARED_GPU | checked_gpu.checker_env(told, counts)
    assert not told.exists() or not told.read_text(), told.read_text()
    rows = [json.loads(line) for line in counts.read_text().splitlines()]
    found = {name: sum(row.get(name, 0) for row in rows) for name in what}
    print(found)
    assert all(found.values()), found
