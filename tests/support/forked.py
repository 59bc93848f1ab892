"""Ranks as forked processes that meet through sockets: one that is killed is gone, the others live on and hear of it.

Jobs of some 50 ms, for tests of many kills; what runs on MPI ranks is tested there too.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from lowshard.comm import Communicator
from lowshard.comm.loopback import LoopbackTransport
from lowshard.comm.reach import Reach
from lowshard.errors import PeerFailed, TimedOut

_LIMIT_S = 30.0


class _Group:
    """This process's sockets to the other ranks, in place of the board that threads share."""

    def __init__(self, rank: int, names: Sequence[int], links: Sequence[socket.socket | None]) -> None:
        self.rank, self.names, self.links = rank, list(names), list(links)
        self.size, self.timeout_s = len(self.links), _LIMIT_S

    def meet(self, mine: Any) -> list[Any]:
        """Send a value to all and return everybody's."""
        raw = pickle.dumps(mine)
        for link in self.links:
            if link is not None:
                with suppress(OSError):  # what a rank sent before it died may still be there
                    link.sendall(len(raw).to_bytes(8, "little") + raw)
        return [mine if link is None else self._take(link, rank) for rank, link in enumerate(self.links)]

    def wait(self, rank: int) -> None:
        """Return once all ranks have come."""
        self.meet(None)

    def _take(self, link: socket.socket, rank: int) -> Any:
        size_bytes = int.from_bytes(self._read(link, rank, 8), "little")
        return pickle.loads(self._read(link, rank, size_bytes))

    def _read(self, link: socket.socket, rank: int, size_bytes: int) -> bytes:
        found = b""
        while len(found) < size_bytes:
            try:
                piece = link.recv(size_bytes - len(found))
            except TimeoutError:
                raise TimedOut(f"rank {self.names[rank]} did not come within {_LIMIT_S:g} s") from None
            except OSError:
                piece = b""
            if not piece:
                raise PeerFailed(f"rank {self.names[rank]} died")
            found += piece
        return found


class ForkedTransport(LoopbackTransport):
    """One process's end of a group."""

    _board: Any

    def new_reach(self) -> Reach:
        return Reach(self.rank, self.size)

    def meet(self, mine: Any) -> list[Any]:
        return self._board.meet(mine)

    def leave(self) -> None:
        pass  # everybody has copies

    def split(self, color: int | None, key: int) -> ForkedTransport | None:
        asked = self.meet((color, key))
        ranks = [r for _, r in sorted((k, r) for r, (c, k) in enumerate(asked) if c == color)]
        if color is None:
            return None
        group, own = self._board, ranks.index(self.rank)
        names, links = [group.names[r] for r in ranks], [group.links[r] for r in ranks]
        return ForkedTransport(_Group(own, names, links), own)  # type: ignore[arg-type]


def run_forked(
    size: int,
    function: Callable[[Communicator], object],
    during: Callable[[list[int]], object] = lambda pids: None,
) -> list[int]:
    """Run `function(comm)` in forked processes and return how each ended, as `os.waitstatus_to_exitcode`.

    Args:
        size: number of ranks.
        function: what each runs; an exception makes its exit code 1.
        during: run meanwhile in this process, on the ids of the others.
    """
    links: list[list[socket.socket | None]] = [[None] * size for _ in range(size)]
    for a in range(size):
        for b in range(a):
            links[a][b], links[b][a] = socket.socketpair()
    pids = [_fork(rank, links, function) for rank in range(size)]
    _close([link for row in links for link in row])
    try:
        during(pids)
        limit = time.monotonic() + _LIMIT_S
        codes: dict[int, int] = {}
        while len(codes) < size and time.monotonic() < limit:
            for pid in pids:
                if pid not in codes and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                    codes[pid] = os.waitstatus_to_exitcode(ended[1])
            time.sleep(0.001)
        return [codes[pid] for pid in pids]
    finally:
        for pid in pids:
            if pid not in codes:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _fork(
    rank: int, links: list[list[socket.socket | None]], function: Callable[[Communicator], object]
) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _close([link for other, row in enumerate(links) if other != rank for link in row])
        for link in links[rank]:
            if link is not None:
                link.settimeout(_LIMIT_S)
        group = _Group(rank, range(len(links)), links[rank])
        function(Communicator(ForkedTransport(group, rank)))  # type: ignore[arg-type]
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _close(links: Sequence[socket.socket | None]) -> None:
    for link in links:
        if link is not None:
            link.close()
