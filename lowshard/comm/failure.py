"""The failure channel: every rank learns at once that another has failed or left, and which one.

MPI tells nobody: where one rank fails, the others wait for it in a collective for ever. So each rank has one
connection to a hub beside MPI: the launcher under `lowshard run`, else rank 0 of the communicator's ranks. A connection
that closes without a farewell is a death. The hub tells all ranks of the first failure, once, in the same words, and of
each rank that leaves. Waits look at one flag, an int64 that is 0 until a failure is known.

There are no heartbeats: a host whose cable is cut is found by the kernel, which asks an idle connection for a sign of
life. A rank that is alive and silent is the deadline's.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import io
import json
import os
import select
import selectors
import shutil
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lowshard import settings
from lowshard.comm.call import Activity
from lowshard.comm.interface import addresses_towards, interface_addresses, is_loopback, network_name
from lowshard.comm.listener import Client, Listener, connect, tune
from lowshard.comm.progress import let_mpi_go_on
from lowshard.errors import CommError, PeerFailed, TimedOut

__all__ = [
    "MESSAGE", "UNCONFIRMED_S", "Channel", "Hub", "Watch", "Wire", "channels", "launcher_channel", "meet",
]  # fmt: skip

MESSAGE = b"m"
"""Kind of a frame that holds an object of JSON; others hold what a rank has printed."""
UNCONFIRMED_S = 12.0
"""How long the kernel waits for a sign of life of another host."""

_VERBS = {
    "failed": "failed", "exit": "ended its program", "timed out": "timed out",
    "disagreed": "found that ranks disagree", "died": "died", "left": "ended its program",
}  # fmt: skip
_HEAD = struct.Struct("!cI")  # kind, length
_MOST_BYTES = 4 << 20  # of a frame; a longer one ends its connection
_READ_BYTES = 1 << 18
_TEXT_CHARACTERS = 1000  # of a failure
_SEND_S = 2.0  # for a hub to take a message
_TELL_S = 1.0  # for a hub to hear of a failure, and to pass it on
_GONE_S = 1.0  # what a rank sent before it left may still be on its way
_GRACE_S = 2.0  # for a process to end by itself after a failure
_CONNECT_S = 10.0
_TURN_S = 0.5
_PURPOSE = 1

_channels: list[Channel] = []  # that this process has open
_hubs: list[Hub] = []
_ending: list[bool] = []  # not empty once this process ends by itself
_from_launcher: dict[str, Channel] = {}  # by what LOWSHARD_LINK says


class Wire:
    """Frames over a connection that does not block: kind, length, content.

    Attributes:
        closed: whether the other end has closed it, or has sent what is no frame.
        unsent: what the kernel has not taken yet.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket, self._came = connection, bytearray()
        self.unsent, self.closed = bytearray(), False

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._socket.fileno()

    def send(self, kind: bytes, content: bytes) -> None:
        """Send a frame, now or with a later `flush`."""
        self.unsent += _HEAD.pack(kind, len(content)) + content
        self.flush()

    def say(self, **message: Any) -> None:
        """Send a message."""
        self.send(MESSAGE, json.dumps(message).encode())

    def flush(self) -> None:
        """Send what has not been sent, as much as the kernel takes."""
        while self.unsent and not self.closed:
            try:
                del self.unsent[: self._socket.send(self.unsent)]
            except BlockingIOError:
                return
            except OSError:
                self.unsent.clear()  # what the other end has said may still be read

    def receive(self) -> list[tuple[bytes, bytes]]:
        """Return the frames that have come."""
        try:
            came = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            came = b""
        self._came += came
        self.closed = not came
        frames = []
        while len(self._came) >= _HEAD.size:
            kind, length = _HEAD.unpack_from(self._came)
            if length > _MOST_BYTES:
                self.closed = True
                break
            if len(self._came) < _HEAD.size + length:
                break
            frames.append((kind, bytes(self._came[_HEAD.size : _HEAD.size + length])))
            del self._came[: _HEAD.size + length]
        return frames

    def close(self) -> None:
        """Close this end."""
        self.closed = True
        self._socket.close()


class Hub:
    """Hears of failures and farewells, and passes them on; `turn` does what there is to do.

    Attributes:
        peers: the ranks' connections, by rank.
        first: the failure that was the first, as it was told to all; None while there is none.
        gone: the ranks that have left.
    """

    def __init__(self, ranks: Sequence[int], listener: Listener | None) -> None:
        """Begin to listen for these ranks; the listener is closed when all have come."""
        self.ranks = frozenset(ranks)
        self.peers: dict[int, Wire] = {}
        self.first: dict[str, Any] | None = None
        self.gone: set[int] = set()
        self.listener = listener
        self.selector = selectors.DefaultSelector()
        if listener is not None:
            self.selector.register(listener, selectors.EVENT_READ)
        _hubs.append(self)

    def add(self, rank: int, connection: socket.socket) -> Wire:
        """Take in a rank's connection."""
        tune(connection, UNCONFIRMED_S)
        wire = Wire(connection)
        self.peers[rank] = wire
        self.selector.register(wire, selectors.EVENT_READ, rank)
        for left in self.gone:
            wire.say(do="gone", rank=left)
        if self.first is not None:
            wire.say(**self.first)
        return wire

    def turn(self, wait_s: float) -> None:
        """Wait a while for something to happen, and do it."""
        if any(wire.unsent for wire in self.peers.values()):
            wait_s = min(wait_s, 0.01)
        for key, _ in self.selector.select(wait_s):
            if key.data is not None:
                self._hear(key.data, self.peers[key.data])
        for wire in self.peers.values():
            wire.flush()
        if self.listener is not None:
            for client in self.listener.admit():
                self._let_in(client)
            if self.ranks <= self.peers.keys():
                self.selector.unregister(self.listener)
                self.listener.close()
                self.listener = None

    def take(self, rank: int, kind: bytes, content: bytes) -> None:
        """Do what a rank has said."""
        message = json.loads(content)
        if message["do"] == "tell":
            self.fail(message["rank"], message["kind"], message["text"])
        elif message["do"] == "bye":
            self.leave(rank)

    def lost(self, rank: int) -> None:
        """Do what follows where a rank's connection has closed."""
        if rank not in self.gone:
            self.fail(rank, "died", "its connection closed")

    def fail(self, rank: int, kind: str, text: str) -> None:
        """Tell all ranks of a failure, if it is the first; a time-out may be followed by others."""
        if self.first is None:
            message = {"do": "failed", "rank": rank, "kind": kind, "text": text[:_TEXT_CHARACTERS]}
            self.first = None if kind == "timed out" else message
            self._tell_all(message)

    def leave(self, rank: int) -> None:
        """Tell all ranks that one has left."""
        if rank not in self.gone:
            self.gone.add(rank)
            self._tell_all({"do": "gone", "rank": rank})

    def close(self) -> None:
        """Close all that is open."""
        if self.listener is not None:
            self.listener.close()
        self.forget()
        _hubs.remove(self)

    def forget(self) -> None:
        """Close the connections, also in a forked child."""
        for wire in self.peers.values():
            wire.close()
        self.selector.close()

    def _let_in(self, client: Client) -> None:
        if client.rank in self.ranks and client.purpose == _PURPOSE:
            if client.rank in self.peers:  # it had given that connection up
                self._drop(client.rank)
            self.add(client.rank, client.connection)
        else:
            client.connection.close()

    def _drop(self, rank: int) -> None:
        self.selector.unregister(self.peers[rank])
        self.peers.pop(rank).close()

    def _hear(self, rank: int, wire: Wire) -> None:
        for kind, content in wire.receive():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # not what a rank says
                self.take(rank, kind, content)
        if wire.closed:
            self.selector.unregister(wire)
            wire.close()
            self.lost(rank)

    def _tell_all(self, message: Mapping[str, Any]) -> None:
        # the teller goes on once it hears this, so last; before it rank 0, whose end is the hub's
        for rank in sorted(self.peers, key=lambda rank: (rank == message["rank"], -rank)):
            self.peers[rank].say(**message)


class Channel:
    """This process's connection to a hub, and what it has heard there. A thread listens.

    Attributes:
        rank: this rank in the job.
        flag: one int64, 0 until a failure is known; waits poll it, compiled ones by its address.
        kind: how the first rank failed; "" while none has.
        failed_rank: which rank that was; None while none has, and where the launcher is gone.
        cause: the failure in words, the same on all ranks.
        gone: when each rank that has left did so, in ns of the monotonic clock.
    """

    def __init__(
        self, connection: socket.socket, rank: int, ranks: Sequence[int] = (), hub: Hub | None = None
    ) -> None:
        """Begin to listen."""
        self.rank, self.ranks = rank, tuple(ranks)
        self.flag = np.zeros(1, np.int64)
        self.kind, self.cause = "", ""
        self.failed_rank: int | None = None
        self.gone: dict[int, int] = {}
        self._watches: list[Watch] = []
        self._socket, self._hub, self._pid = connection, hub, os.getpid()
        self._wire = Wire(connection)
        self._lock, self._taking = threading.Lock(), threading.Lock()
        self._failed_s, self._left, self._hub_ends = 0.0, False, False
        self._ends = settings.ON_FAILURE.text() == "end"
        self._threads = [threading.Thread(target=self._listen, name="lowshard-failures", daemon=True)]
        if hub is not None:
            self._threads.append(threading.Thread(target=self._serve, name="lowshard-hub", daemon=True))
        for thread in self._threads:
            thread.start()
        _channels.append(self)

    @property
    def is_launchers(self) -> bool:
        """Whether the hub is the launcher."""
        return not self.ranks

    def say(self, **message: Any) -> None:
        """Send the hub a message."""
        end_s = time.monotonic() + _SEND_S
        with self._lock:
            self._wire.say(**message)
            while self._wire.unsent and time.monotonic() < end_s:
                time.sleep(0.002)
                self._wire.flush()

    def tell(
        self, kind: str, text: str, record: Mapping[str, Any] | None = None, about: int | None = None
    ) -> None:
        """Tell all ranks that this one fails; returns once they have been told, or after a second.

        Where a failure is known already that one stands; a record for the launcher goes out all the same.

        Args:
            kind: how it fails: "failed", "exit", "timed out", "disagreed", "left".
            text: why, in words.
            record: what the launcher is to know.
            about: the rank that failed, where it is another one.
        """
        if os.getpid() != self._pid or (self.flag[0] and record is None):
            return
        rank = self.rank if about is None else about
        self.say(do="tell", rank=rank, kind=kind, text=" ".join(text.split()), record=record)
        end_s = time.monotonic() + _TELL_S
        while not self.flag[0] and time.monotonic() < end_s:
            time.sleep(0.001)

    def renew(self) -> None:
        """Forget a time-out, since all ranks have come to make a communicator; raise for another failure.

        A rank that was told of it need not have listened yet.
        """
        unheard, end_s = select.poll(), time.monotonic() + _TELL_S
        unheard.register(self._socket, select.POLLIN)
        while not self._wire.closed and time.monotonic() < end_s:
            with self._taking:
                if not unheard.poll(0):
                    break
            time.sleep(0.001)
        if self.kind == "timed out":
            self.kind, self.cause, self.failed_rank, self._failed_s = "", "", None, 0.0
            self.flag[0] = 0
        if self.flag[0]:
            raise self.error("the making of a communicator")

    def error(self, where: str) -> CommError:
        """Return the error to raise on this rank for the failure that is known."""
        if self.failed_rank == self.rank and self.kind == "timed out":
            return TimedOut(self.cause)
        error = PeerFailed(f"{self.cause}; this rank was in {where}")
        return error if self.failed_rank is None else error.about([self.failed_rank])

    def leave(self) -> None:
        """Say farewell: this rank's program has come to its end."""
        if os.getpid() == self._pid and not self._left:
            self._left = True
            self.say(do="bye")

    def await_others(self) -> None:
        """Wait until all ranks have left, as MPI's finalize would, which may let no message go on.

        Not after a failure: then this process is ended after the grace, or by the launcher.
        """
        ranks = set(self.ranks).union(*(watch.world_ranks for watch in self._watches))
        while not ranks <= self.gone.keys() and self._threads[0].is_alive():
            if self.flag[0] and (self.is_launchers or not self._ends):
                return
            let_mpi_go_on()  # what others wait for may still lie here
            self._threads[0].join(0.002)

    def drop(self) -> None:
        """Give it up: not all ranks could connect."""
        self._left, self._hub_ends = True, True
        self.forget()
        _channels.remove(self)

    def forget(self) -> None:
        """Close the connection in a forked child: it must close when the rank itself dies."""
        self._wire.close()

    def _serve(self) -> None:
        """Be the hub, until all have left or failed."""
        assert self._hub is not None
        while not self._hub_ends and not self._hub.ranks <= self._hub.gone | {
            rank for rank, wire in self._hub.peers.items() if wire.closed
        }:
            self._hub.turn(_TURN_S)
        self._hub.turn(0)
        self._hub.close()

    def _listen(self) -> None:
        """Take in what the hub says; end this process where it hangs after a failure."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while not self._wire.closed:
            is_due = self._failed_s and not _ending and not self.is_launchers
            left_s = self._failed_s + _GRACE_S - time.monotonic()
            if is_due and left_s <= 0:
                self._end_process()
            poll.poll(max(1, 1000 * left_s) if is_due else 1000 * _TURN_S if self._failed_s else None)
            with self._taking:
                for _, content in self._wire.receive():
                    self._take(json.loads(content))
        if not self._left and not self.flag[0]:
            hub = self.ranks[0] if self.ranks else None
            who = "the launcher is gone" if hub is None else f"rank {hub} died: its connection closed"
            self._fail("died", hub, who)
        while self._failed_s and not self.is_launchers and not _ending:  # rank 0 was the hub
            time.sleep(0.05)
            if time.monotonic() > self._failed_s + _GRACE_S:
                self._end_process()

    def _take(self, message: Mapping[str, Any]) -> None:
        rank = message["rank"]
        if message["do"] == "gone":
            self.gone[rank] = time.monotonic_ns()
            for watch in self._watches:
                watch.note_gone(rank)
        elif not self.flag[0]:
            verb = _VERBS.get(message["kind"], "failed")
            self._fail(message["kind"], rank, f"rank {rank} {verb}: {message['text']}")

    def _fail(self, kind: str, rank: int | None, cause: str) -> None:
        self.kind, self.failed_rank, self.cause = kind, rank, cause
        self.flag[0] = 1
        if self._ends:
            self._failed_s = time.monotonic()
        if kind == "timed out":
            for watch in self._watches[:1]:
                _write(time_out_report(self.rank, watch.activity))

    def _end_process(self) -> None:
        """End this process: a rank failed, and this one waits for it in MPI, computes, or sleeps."""
        code = TimedOut.exit_code if self.kind == "timed out" else PeerFailed.exit_code
        where = "" if not self._watches else f"; this rank was in {self._watches[0].activity.where()} and"
        _write(
            f"rank {self.rank} | {self.cause}{where or '; this rank'} did not end within {_GRACE_S:g} s: it ends with "
            f"exit code {code}\n"
        )
        os._exit(code)


class Watch:
    """The channel as a group of ranks sees it: what `wait_guard.Watching` describes."""

    def __init__(self, channel: Channel, world_ranks: Sequence[int], activity: Activity) -> None:
        self.channel, self.flag = channel, channel.flag
        self.world_ranks: Sequence[int] = tuple(world_ranks)
        self.activity = activity
        self._gone_ns = np.zeros(len(self.world_ranks), np.int64)
        channel._watches.append(self)
        for rank in list(channel.gone):
            self.note_gone(rank)

    def note_gone(self, rank: int) -> None:
        """Note that a rank of the job has left."""
        if rank in self.world_ranks:
            self._gone_ns[self.world_ranks.index(rank)] = self.channel.gone[rank]

    @property
    def gone_address(self) -> int:
        """Address of an int64 a rank: when it ended its program in order, in ns of the monotonic clock, or 0."""
        return int(self._gone_ns.ctypes.data)

    def error(self, where: str) -> CommError:
        """Return the error to raise on this rank after a failure, in which it was in `where`."""
        return self.channel.error(where)

    def tell(self, kind: str, text: str) -> None:
        """Tell all ranks that this one fails; after a time-out each of them prints what it was in."""
        self.channel.tell(kind, text)

    def check_gone(self, missing_ranks: Iterable[int], where: str) -> None:
        """Raise PeerFailed if one of these ranks, for which this one waits, has left more than a second ago."""
        now_ns = time.monotonic_ns()
        for rank in missing_ranks:
            gone_ns = int(self._gone_ns[rank])
            if gone_ns and now_ns - gone_ns > _GONE_S * 1e9:
                name = self.world_ranks[rank]
                raise PeerFailed(
                    f"rank {name} has ended its program without this collective; this rank waits for it in {where}"
                ).about([name])


def channels() -> tuple[Channel, ...]:
    """Return the channels that this process has open."""
    return (*_channels,)


def begin_end() -> None:
    _ending.append(True)


def launcher_channel(rank: int) -> Channel | None:
    """Return the channel to the launcher that started this process as a rank; None where none did.

    Its supervisor has left a descriptor for this very process.
    """
    text = settings.LINK.text()
    if text not in _from_launcher:
        word, _, rest = text.partition(":")
        fd, _, pid = rest.partition(":")
        if word != "fd" or pid != str(os.getpid()):
            return None
        try:
            connection = socket.socket(fileno=int(fd))
        except OSError:  # the program has closed it
            return None
        connection.set_inheritable(False)
        _from_launcher[text] = Channel(connection, rank)
    return _from_launcher[text]


def meet(mpi_comm: Any, world_ranks: Sequence[int]) -> Channel:
    """Connect all ranks of a communicator with its rank 0.

    Collective: all ranks of `mpi_comm` call this. Ranks of rank 0's machine reach it by a Unix socket in a private
    folder; where some are on other hosts, all reach it by TCP at the addresses that lead to those hosts, or at that of
    LOWSHARD_INTERFACE.
    """
    rank = mpi_comm.Get_rank()
    hosts = [a for some in interface_addresses().values() for a in some if not is_loopback(a)]
    seats = mpi_comm.allgather((network_name(), hosts[:16]))
    channel: Channel | None = None
    problem, offer = "", (tuple[str, ...](), "")
    with contextlib.ExitStack() as stack:
        if rank == 0:
            try:
                listener, folder = _listen(seats)
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
                hub = Hub(world_ranks, listener)
                offer = (listener.addresses, listener.token.hex())
                mine, theirs = socket.socketpair()
                hub.add(world_ranks[0], theirs)
                channel = Channel(mine, world_ranks[0], world_ranks, hub)
            except (OSError, CommError) as error:
                problem = f"rank 0 on {socket.gethostname()} cannot listen: {error}"
        addresses, token = mpi_comm.bcast(offer, 0)
        if rank and addresses:
            near = [a for a in addresses if seats[0][0] == network_name() or not _is_near(a)]
            try:
                mine = connect(near, bytes.fromhex(token), _PURPOSE, world_ranks[rank], _CONNECT_S)
                tune(mine, UNCONFIRMED_S)
                channel = Channel(mine, world_ranks[rank], world_ranks)
            except ConnectionError as error:
                problem = (
                    f"rank {world_ranks[rank]} on {socket.gethostname()} reaches none of rank 0's addresses ({error}); "
                    f"let such connections through, or set {settings.INTERFACE.name} to the interface of rank 0's host "
                    "that leads to all hosts"
                )
        problems = [said for said in mpi_comm.allgather(problem) if said]
        if problems:
            if channel is not None:
                channel.drop()
            raise CommError(f"every rank needs a connection to rank 0: {problems[0]}")
    assert channel is not None
    return channel


def time_out_report(rank: int, activity: Activity) -> str:
    """Return what this rank is in, its last collectives and the stacks of all threads, for a wait that was too long.

    When a rank tells of a time-out every rank prints this to stderr.
    """
    out = io.StringIO()
    out.write(f"time-out report: this rank is in {activity.where()}\n")
    activity.dump_ring(out)
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        out.write(file.read())
    return "".join(f"rank {rank} | {line}\n" for line in out.getvalue().splitlines() if line)


def _listen(seats: Sequence[tuple[str, Sequence[str]]]) -> tuple[Listener, str]:
    """Return rank 0's listener, and the folder that was made for it, or ""."""
    if settings.INTERFACE.is_set():
        named, known = settings.INTERFACE.text(), interface_addresses()
        if named not in known:
            raise CommError(
                f"{settings.INTERFACE.name} names a network interface of rank 0's host with an address, one of "
                f"{', '.join(sorted(known))}; got {named!r}"
            )
        return Listener.on_network(known[named][:1]), ""  # of several, IPv4 comes first
    networks = [network for network, _ in seats]
    if len(set(networks)) == 1:
        folder = tempfile.mkdtemp(prefix="lowshard-")
        try:
            return Listener.in_folder(Path(folder)), folder
        except OSError:  # a file system that takes no sockets
            shutil.rmtree(folder, ignore_errors=True)
            return Listener.on_network(["127.0.0.1"]), ""
    far = dict.fromkeys(host for network, hosts in seats if network != networks[0] for host in hosts)
    near = ["127.0.0.1"] if networks[0] in networks[1:] else []
    return Listener.on_network(tuple(dict.fromkeys([*near, *addresses_towards(far)]))), ""


def _is_near(address: str) -> bool:
    """Say whether an address leads to its own machine alone."""
    scheme, _, where = address.partition(":")
    return scheme == "unix" or is_loopback(where.removeprefix("//").rpartition(":")[0].strip("[]"))


def _write(text: str) -> None:
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # a broken or closed stream has no reader
            sys.stderr.write(text)
            sys.stderr.flush()


@atexit.register
def _leave_all() -> None:
    for channel in _channels:
        channel.leave()
    for channel in _channels:
        channel.await_others()


def _forget_in_child() -> None:
    for channel in _channels:
        channel.forget()
    for hub in _hubs:
        hub.forget()
    _channels.clear()
    _hubs.clear()


os.register_at_fork(after_in_child=_forget_in_child)
