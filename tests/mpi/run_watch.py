"""What each rank of the side channel's tests runs: the ranks take roles, one of them fails in the way named.

Arguments: how the victim fails; its rank; the roles of all ranks, comma-separated; a folder for the ranks' notes.
With LOWSHARD_TEST_WITHOUT_NUMBA the side channel finds no Numba (and is to find no code that came compiled).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

if "LOWSHARD_TEST_WITHOUT_NUMBA" in os.environ:
    sys.modules["numba"] = None  # type: ignore[assignment]

from mpi4py import MPI

from lowshard.comm import heartbeat
from lowshard.comm.abort import install_abort_hook
from lowshard.comm.call import Activity
from lowshard.comm.watch import Watch
from lowshard.errors import TimedOut


class Call:
    """A call as the communicators describe it."""

    text = "all_reduce float64[16384]"
    encoded = text.encode()


GRACE_S = {"sleep": 0.3, "barrier": 0.3}
HELD_S = 3.0
LONG_S = 30.0


def hold_the_interpreter(seconds: float) -> None:
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def fail(how: str, watch: Watch) -> None:
    if how == "raise":
        raise ValueError("boom")
    if how == "exit":
        sys.exit(3)
    if how == "time out":
        raise TimedOut("all_reduce#4 was not done after 30 s")
    if how == "SIGKILL" and not os.fork():
        time.sleep(2.0)  # a child that outlives the rank holds none of its connections
        os._exit(0)
    os.kill(os.getpid(), getattr(signal, how))
    time.sleep(LONG_S)


def main(how: str, victim: int, roles: list[str], folder: Path) -> None:
    world = MPI.COMM_WORLD
    role = roles[world.rank]
    activity = Activity()
    install_abort_hook()
    watch = Watch.start(world, activity, grace_s=GRACE_S.get(role, 5.0))
    assert (heartbeat.compiled_loop() is heartbeat.loop) == ("LOWSHARD_TEST_WITHOUT_NUMBA" in os.environ)
    activity.enter(Call(), 4)
    time.sleep(0.5)  # a heartbeat or two
    world.Barrier()

    def note(name: str, text: str) -> None:
        (folder / f"{name}-{world.rank}").write_text(text)

    if role == "victim":
        time.sleep(0.2)
        note("failed", str(time.time()))
        fail(how, watch)
    if role == "poll":
        while not watch.flag[0]:
            time.sleep(0.001)
        note("learned", f"{time.time()} {type(watch.error('')).__name__} {watch.cause}")
        raise watch.error(activity.where())
    if role == "sleep":
        time.sleep(LONG_S)
    if role == "barrier":
        world.Barrier()
    if role == "quiet":
        quiet(watch, world)
    note("ended", role)  # by the end of the program


def quiet(watch: Watch, world: MPI.Comm) -> None:
    """All is well, though two ranks hold the interpreter for longer than the limit, and one ends early."""
    if world.rank in (0, 2):
        hold_the_interpreter(HELD_S)
    else:
        time.sleep(HELD_S)
    time.sleep(0.5)
    assert watch.cause == "", watch.cause
    world.Barrier()
    if world.rank == 1:
        return
    while not watch.left(1):
        time.sleep(0.001)
    assert 1 in watch.gone


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3].split(","), Path(sys.argv[4]))
