"""One rank of a side channel without MPI, so that each rank may run in a network of its own.

Arguments: rank; number of ranks; a folder that all share: what MPI would carry goes through it, and the ranks' notes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from lowshard.comm import heartbeat
from lowshard.comm.call import Activity
from lowshard.comm.watch import Watch
from lowshard.errors import CommError

heartbeat.compiled_loop = lambda: heartbeat.loop  # type: ignore[assignment]  # starts in no time
LONG_S = 30.0


class FolderComm:
    """What a watch needs of an mpi4py communicator, by files."""

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        self._rank, self._size, self._folder, self._turn = rank, size, folder, 0

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return self._size

    def Ibcast(self, buffer: Any, root: int) -> Any:
        return self._exchange(buffer, lambda rows: np.copyto(buffer, rows[root]))

    def Ibarrier(self) -> Any:
        return self._exchange(np.zeros(1, np.uint8), lambda rows: None)

    def Iallgather(self, mine: Any, out: Any) -> Any:
        return self._exchange(mine, lambda rows: np.copyto(out, np.stack(rows)))

    def _exchange(self, mine: Any, take: Callable[[list[Any]], None]) -> Any:
        turn, self._turn = self._turn, self._turn + 1
        draft = self._folder / f"draft-{self._rank}"
        draft.write_bytes(mine.tobytes())
        draft.rename(self._folder / f"{turn}-of-{self._rank}")
        paths = [self._folder / f"{turn}-of-{rank}" for rank in range(self._size)]

        def done() -> bool:
            if not all(path.exists() for path in paths):
                return False
            take([np.frombuffer(path.read_bytes(), np.uint8).reshape(mine.shape) for path in paths])
            return True

        return SimpleNamespace(Test=done)


def main(rank: int, size: int, folder: Path) -> None:
    def note(name: str, text: str) -> None:
        draft = folder / f"note-{rank}"
        draft.write_text(text)
        draft.rename(folder / f"{name}-{rank}")

    try:
        watch = Watch.start(FolderComm(rank, size, folder), Activity(), connect_limit_s=1.0)
    except CommError as error:
        note("refused", str(error))
        return
    note("started", "")
    end_s = time.monotonic() + LONG_S
    while not watch.flag[0] and time.monotonic() < end_s:
        time.sleep(0.001)
    note("learned", f"{time.time()} {watch.cause}")
    while time.monotonic() < end_s and not (folder / "over").exists():
        time.sleep(0.01)  # as the others have yet to learn
    watch.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
