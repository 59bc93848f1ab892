"""The launcher's end of the link to its ranks: who is alive, who is stopped, who has gone silent.

A thread of its own reads the keepers' messages (`launch/uplink.py`), so that a launcher whose output is blocked
still hears its ranks. It judges silence only after it has read what is there: a launcher that was stopped itself
must not take that for the silence of all others. The keepers come in by a door that strangers cannot pass
(`lowshard.comm.door`); what comes over a connection that was let in ends that connection at worst, never the thread.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from lowshard.comm.abort import FailureRecord
from lowshard.comm.door import Door, Guest
from lowshard.comm.interface import addresses_towards, boot_id, interface_addresses
from lowshard.errors import InternalError, LaunchError, PeerFailed
from lowshard.launch.host import Spread
from lowshard.launch.uplink import (
    BEAT_S,
    PURPOSES,
    KeeperMessage,
    LinkAddress,
    read_message,
    stopped_record,
)
from lowshard.launch.verdict import Leaver
from lowshard.settings import HEARTBEAT_S, LINK, START_S

__all__ = ["Link"]

_TURN_S = 0.1
_READ_BYTES = 1 << 16
_LINE_BYTES = 1 << 20  # longest message of a keeper
_JOIN_S = 5.0  # for the thread to end; it never waits for anybody
_SUSPECT_S = 5 * BEAT_S  # silence that explains why others say that a rank has failed
_LATE_S = (
    0.25  # by which this end may hear of a keeper's end later than the ranks, but sooner than they end others
)
_GONE_S = 1.5  # for the rank whose failure made mpiexec kill a keeper to be heard of


@dataclass
class _Peer:
    """A keeper's connection, and what is known of its rank."""

    connection: socket.socket
    rank: int
    heard_s: float  # monotonic
    heard_at_s: float  # wall clock
    host: str = "an unknown host"  # until it has said so
    keeper_pid: int = 0
    behind_s: float = 0.0  # by how much its host's clock is behind this one's
    received: bytes = b""
    rank_pid: int | None = None
    takes_stack_signal: bool = False
    stopped_at_s: float | None = None  # wall clock, the last time that it was
    continued_at_s: float | None = None
    ended: bool = False
    left_at_s: float | None = None  # wall clock: its program was over, or it ended with exit code 0
    is_over: bool = False  # its program has come to its end in order
    gone: bool = False  # closed without a word


@dataclass
class _State:
    """What both threads look at, under the lock."""

    peers: dict[int, _Peer] = field(default_factory=dict)
    reported: dict[int, FailureRecord] = field(default_factory=dict)
    lost: dict[int, FailureRecord] = field(default_factory=dict)
    streams: list[tuple[socket.socket, int, int]] = field(default_factory=list)


class Link:
    """Listens for the keepers of a job's ranks.

    Attributes:
        address: where; its text goes to the ranks in `LOWSHARD_LINK`.
    """

    def __init__(
        self, n: int, env: Mapping[str, str], folder: Path | None, spread: Spread | None = None
    ) -> None:
        """Opens the door.

        Args:
            n: number of ranks to expect.
            env: environment with the limits `LOWSHARD_HEARTBEAT_S` and `LOWSHARD_START_S`.
            folder: a private folder to make the door in; None where ranks on other hosts are to reach it.
            spread: those hosts, if they are known.

        Raises:
            LaunchError: a limit is not a number, or the door cannot be opened.
        """
        self._n = n
        self._limit_s = HEARTBEAT_S.seconds(env, LaunchError)
        self._start_s = START_S.seconds(env)
        self._state = _State()
        self._lock = threading.Lock()
        self._crash: BaseException | None = None
        self._ending = threading.Event()
        self._closed = threading.Event()
        try:
            self._door = _open_door(folder, spread)
        except OSError as error:
            raise LaunchError(f"the launcher needs a socket for its ranks to report to: {error}") from error
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._door, selectors.EVENT_READ)
        self._wakes, self._waker = socket.socketpair()
        self._selector.register(self._wakes, selectors.EVENT_READ)
        self.address = LinkAddress(self._door.token.hex(), boot_id(), self._door.addresses)
        self._thread = threading.Thread(target=self._run, name="lowshard link", daemon=True)
        self._started_s = time.monotonic()

    def start(self) -> dict[str, str]:
        """Starts to listen; returns the variables that the ranks need."""
        self._started_s = time.monotonic()
        self._thread.start()
        return {LINK.name: str(self.address)}

    def check(self) -> None:
        """Raises where the link watches nobody any more.

        Raises:
            InternalError: its thread has come to an end that it should not.
        """
        if self._crash is not None:
            raise InternalError(f"the launcher's link to its ranks broke: {self._crash!r}") from self._crash

    def failures(self) -> list[FailureRecord]:
        """Returns what the keepers have reported, and what this end has noted of ranks that it hears no more."""
        with self._lock:
            return [*self._state.lost.values(), *self._state.reported.values()]

    def suspects(self, at_s: float) -> list[FailureRecord]:
        """Returns records of the ranks that were stopped, silent or gone for good at a moment (wall clock).

        They may be what others complained of then, sooner than this end judges.
        """
        now_s, wall_s = time.monotonic(), time.time()
        found = []
        with self._lock:
            for peer in self._state.peers.values():
                until_s = peer.continued_at_s or wall_s
                is_silent = not peer.ended and not peer.gone and now_s - peer.heard_s > _SUSPECT_S
                if peer.stopped_at_s is not None and peer.stopped_at_s < at_s < until_s:
                    found.append(stopped_record(peer.rank, peer.stopped_at_s, until_s))
                elif peer.gone and peer.heard_at_s < at_s + _LATE_S:
                    found.append(_gone_record(peer))
                elif is_silent and peer.heard_at_s < at_s:
                    found += [record for record in self._silence(peer, now_s) if record.rank == peer.rank]
        return found

    def leavers(self) -> list[Leaver]:
        """Returns the ranks that have left with exit code 0, which is a failure only where others need them."""
        with self._lock:
            return [
                Leaver(peer.rank, peer.left_at_s, peer.is_over)
                for peer in self._state.peers.values()
                if peer.left_at_s is not None
            ]

    def streams(self) -> list[tuple[socket.socket, int, int]]:
        """Hands over the output connections that have come since: (socket, 0 for stdout or 1 for stderr, rank)."""
        with self._lock:
            found, self._state.streams = self._state.streams, []
        return found

    def first_killed(self) -> list[FailureRecord]:
        """Returns the record of the rank whose keeper was the first to close the link without a word; [] if none."""
        with self._lock:
            gone = [peer for peer in self._state.peers.values() if peer.gone]
        return [_gone_record(min(gone, key=lambda peer: peer.heard_at_s))] if gone else []

    def ask_for_stacks(self) -> None:
        """Asks the keepers to make their ranks print the stacks of their threads."""
        with self._lock:
            for peer in self._state.peers.values():
                if peer.takes_stack_signal and not peer.ended and not peer.gone:
                    with contextlib.suppress(OSError):  # it ends meanwhile, or reads no more
                        peer.connection.send(b'{"do": "stacks"}\n')

    def expect_ends(self) -> None:
        """From now on silence is no failure: the job is being ended."""
        self._ending.set()

    def close(self, limit_s: float = 0.0) -> None:
        """Waits so long at most for the keepers' last words, then closes: a keeper that lives ends its rank."""
        self.expect_ends()
        if self._closed.is_set():
            return
        end_s = time.monotonic() + limit_s
        while time.monotonic() < end_s and self._thread.is_alive():
            with self._lock:
                peers = self._state.peers.values()
                if all(peer.ended or peer.gone or peer.rank in self._state.lost for peer in peers):
                    break
            time.sleep(0.01)
        self._closed.set()
        self._waker.close()  # the thread sees that, and looks
        if self._thread.ident is not None:
            self._thread.join(_JOIN_S)
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
        for connection, _, _ in self.streams():
            connection.close()

    def _run(self) -> None:
        """The thread."""
        try:
            self._serve()
        except BaseException as error:
            self._crash = error

    def _serve(self) -> None:
        """Reads what comes, then judges; again and again."""
        turn_s = time.monotonic()
        while not self._closed.is_set():
            for key, _ in self._selector.select(_TURN_S):
                if key.data is not None:
                    self._read(key.data)
            for guest in self._door.admit():
                self._greet(guest)
            now_s = time.monotonic()
            if now_s - turn_s > 1.0:  # this process was stopped, or had no core: nobody could be heard
                with self._lock:
                    for peer in self._state.peers.values():
                        peer.heard_s = min(now_s, peer.heard_s + now_s - turn_s)
                self._started_s += now_s - turn_s
            turn_s = now_s
            if not self._ending.is_set():
                self._judge(now_s)

    def _greet(self, guest: Guest) -> None:
        """Takes in a connection of one of the ranks."""
        if guest.rank >= self._n or guest.purpose >= len(PURPOSES):
            guest.connection.close()
            return
        with self._lock:
            if PURPOSES[guest.purpose] == "keeper":
                peer = _Peer(guest.connection, guest.rank, heard_s=time.monotonic(), heard_at_s=time.time())
                self._state.peers[peer.rank] = peer
                self._selector.register(guest.connection, selectors.EVENT_READ, peer)
            else:
                self._state.streams.append(
                    (guest.connection, PURPOSES.index("stderr") == guest.purpose, guest.rank)
                )

    def _read(self, peer: _Peer) -> None:
        """Takes in what a keeper says."""
        data = _receive(peer.connection, _READ_BYTES)
        if data is None:
            return
        with self._lock:
            peer.heard_s, peer.heard_at_s = time.monotonic(), time.time()
            *lines, peer.received = (peer.received + data).split(b"\n")
            if not data or len(peer.received) > _LINE_BYTES:
                peer.gone = not peer.ended
                self._selector.unregister(peer.connection)
                peer.connection.close()
            for line in lines:
                with contextlib.suppress(LaunchError):  # a line that a killed keeper has not finished
                    self._take(peer, read_message.text(line.decode(errors="replace")))

    def _take(self, peer: _Peer, message: KeeperMessage) -> None:
        """Takes in one message."""
        if message.host is not None:
            peer.host, peer.keeper_pid = message.host, message.pid
            if message.boot != self.address.boot:
                peer.behind_s = time.time() - message.time_s
        if message.stopped_at_s:
            peer.stopped_at_s, peer.continued_at_s = message.stopped_at_s + peer.behind_s, None
        elif message.stopped_at_s is not None and peer.continued_at_s is None:
            peer.continued_at_s = time.time()
        peer.rank_pid = message.rank_pid or peer.rank_pid
        peer.takes_stack_signal |= message.takes_stack_signal
        peer.ended |= message.ended
        peer.is_over |= message.is_over
        if peer.left_at_s is None and (peer.is_over or (message.ended and message.status == 0)):
            peer.left_at_s = time.time()
        if message.failure is not None:
            record = message.failure
            record = replace(record, rank=peer.rank, time_s=record.time_s + peer.behind_s)
            self._state.reported.setdefault(peer.rank, record)

    def _judge(self, now_s: float) -> None:
        """Notes who has been silent for too long, and who never came."""
        with self._lock:
            for peer in self._state.peers.values():
                silent_s = now_s - peer.heard_s
                if peer.gone and silent_s > _GONE_S:
                    self._state.lost.setdefault(peer.rank, _gone_record(peer))
                elif not peer.gone and not peer.ended and silent_s > self._limit_s:
                    for record in self._silence(peer, now_s):
                        self._state.lost.setdefault(record.rank, record)
            if now_s - self._started_s > self._start_s:
                for rank in set(range(self._n)) - set(self._state.peers):
                    text = (
                        f"nothing was heard of it within {self._start_s:g} s of the start ({START_S.name}); its "
                        f"host cannot be reached, or does not get the program started"
                    )
                    record = FailureRecord(rank, time.time(), "lost", PeerFailed.exit_code, text)
                    self._state.lost.setdefault(rank, record)

    def _silence(self, peer: _Peer, now_s: float) -> list[FailureRecord]:
        """Returns the records of a silent rank and, if all of its host is silent, of the host's other ranks."""
        there = [
            other
            for other in self._state.peers.values()
            if other.host == peer.host and not other.ended and not other.gone
        ]
        silent = [other for other in there if now_s - other.heard_s > _SUSPECT_S]
        ranks, who = [peer.rank], f"its keeper on {peer.host}"
        if len(silent) == len(there):
            ranks = sorted(other.rank for other in silent)
            who = f"host {peer.host} (rank{'s' if ranks[1:] else ''} {', '.join(map(str, ranks))})"
        text = (
            f"{who} has not been heard of for {now_s - peer.heard_s:.1f} s: the network or the machine failed, or "
            f"it was suspended; if it only pauses so long, raise {HEARTBEAT_S.name}"
        )
        at_s = min(
            self._state.peers[rank].heard_at_s for rank in ranks
        )  # all at once: the lowest rank is named
        return [FailureRecord(rank, at_s, "lost", PeerFailed.exit_code, text) for rank in ranks]


def _open_door(folder: Path | None, spread: Spread | None) -> Door:
    """Opens the door where a job's hosts find it, and nowhere else.

    Raises:
        OSError: it cannot be opened there.
    """
    if folder is not None:
        try:
            return Door.in_folder(folder)
        except OSError:  # a file system that takes no sockets
            return Door.on_network(["127.0.0.1"])
    if spread is not None and spread.iface:
        named = interface_addresses().get(spread.iface)
        if named is None:
            raise OSError(f"this host has no network interface {spread.iface!r} with an address")
        return Door.on_network(named[:1])
    return Door.on_network(
        addresses_towards(host.name.strip("[]") for host in spread.hosts) if spread else addresses_towards(())
    )


def _receive(connection: socket.socket, most: int) -> bytes | None:
    """Returns what has come: b"" if the other end has closed, None if nothing has."""
    try:
        return connection.recv(most)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _gone_record(peer: _Peer) -> FailureRecord:
    """Returns the record of a rank whose keeper has closed the link without a word."""
    text = (
        f"its keeper on {peer.host} (process {peer.keeper_pid}) was killed; if nobody killed it, the kernel did for "
        f"want of memory: see dmesg there"
    )
    return FailureRecord(peer.rank, peer.heard_at_s, "lost", PeerFailed.exit_code, text)
