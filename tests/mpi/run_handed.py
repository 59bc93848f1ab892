"""What goes wrong while private memory is handed on between two ranks: both learn of it inside the call.

Arguments: the call; the signal that the second rank sends itself, or LOST for a byte that never comes.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from lowshard.comm import from_mpi

os.sched_getaffinity = lambda pid: set(range(64))  # ranks that share cores are handed nothing

ELEMS = (1 << 18) - (1 << 10)  # 1,020 KiB, the most that is handed on
AFTER_S = 0.3


def take_a_byte(pipe: int) -> None:
    """Take one byte out of a pipe, once there is one."""
    while True:
        try:
            os.read(pipe, 1)
        except BlockingIOError:
            continue
        return


def main(name: str, sent: str) -> None:
    comm = from_mpi(MPI.COMM_WORLD, "cpu")
    send, recv, half = np.ones(ELEMS, np.float32), np.empty(2 * ELEMS, np.float32), [ELEMS // 2] * 2
    calls: dict[str, Callable[[], object]] = {
        "all_gather": lambda: comm.all_gather(send, recv),
        "all_to_all_v": lambda: comm.all_to_all_v(
            send, half, [0, ELEMS // 2], recv[:ELEMS], half, [0, ELEMS // 2]
        ),
        "send_recv": lambda: comm.send_recv(send, 1 - comm.rank, recv[:ELEMS], 1 - comm.rank),
    }
    if comm.rank == 1:
        if sent == "LOST":
            gone = threading.Timer(
                AFTER_S, take_a_byte, (int(comm._transport.place.memory.pipes.table[0, 1]),)
            )  # type: ignore[attr-defined]
        else:
            gone = threading.Timer(AFTER_S, os.kill, (os.getpid(), getattr(signal, sent)))
        gone.daemon = True
        gone.start()
    end_s = time.monotonic() + 30
    while time.monotonic() < end_s:
        calls[name]()
    print("not reached", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
