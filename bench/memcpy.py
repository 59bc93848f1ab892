"""The yardstick of every figure: a plain copy of as many bytes, by as many processes, in the same run."""

from __future__ import annotations

import time

import numpy as np

from lowshard.comm import Communicator


class BesideMemcpy:
    """Times of rounds, each beside that of a copy right after it. A base of rows of tables."""

    seconds: tuple[float, ...]
    memcpy_s: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """X memcpy: the median over rounds."""
        return float(np.median([a / b for a, b in zip(self.seconds, self.memcpy_s, strict=True)]))

    @property
    def median_s(self) -> float:
        """Median time of a round."""
        return float(np.median(self.seconds))


def memcpy_bytes_per_s(comm: Communicator, size_bytes: int = 1 << 25, rounds: int = 7) -> float:
    """Return the bytes a second that each rank copies while all ranks copy at once. Collective."""
    src, dst = np.ones(size_bytes, np.uint8), np.zeros(size_bytes, np.uint8)
    times_s = np.empty(rounds)
    np.copyto(dst, src)
    for i in range(rounds):
        comm.barrier()
        start_s = time.perf_counter()
        np.copyto(dst, src)
        times_s[i] = time.perf_counter() - start_s
    comm.all_reduce(times_s, times_s, op="max")
    return float(size_bytes / np.median(times_s))
