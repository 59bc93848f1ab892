"""A rank's end of the link to the launcher: a connection from the keeper of each rank, through the job's door.

Up it go, as lines of JSON, the rank's pid and host, a heartbeat with the rank's state, and its failure; down come
requests. A keeper on another host also opens a connection for each of the rank's output streams. `launch/link.py`
is the launcher's end.
"""

from __future__ import annotations

import json
import os
import socket
import string
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lowshard.comm.abort import FailureRecord
from lowshard.comm.door import TOKEN_BYTES, enter, tune
from lowshard.comm.interface import boot_id
from lowshard.errors import LaunchError, PeerFailed
from lowshard.reading import reader
from lowshard.settings import HEARTBEAT_S, LINK

__all__ = [
    "BEAT_S",
    "PURPOSES",
    "KeeperMessage",
    "LinkAddress",
    "Uplink",
    "failure_fields",
    "read_message",
    "stopped_record",
]

PURPOSES = ("keeper", "stdout", "stderr")  # what a connection is for, by its number
BEAT_S = 0.2

_LINE_BYTES = 1 << 16
_MOST_UNSENT_BYTES = 1 << 20


def stopped_record(rank: int, stopped_at_s: float, now_s: float) -> FailureRecord:
    """Returns the record of a rank that is stopped; times are wall-clock seconds."""
    text = (
        f"has been stopped (SIGSTOP) for {now_s - stopped_at_s:.1f} s; to debug a rank at leisure raise "
        f"{HEARTBEAT_S.name}"
    )
    return FailureRecord(rank, stopped_at_s, "stopped", PeerFailed.exit_code, text)


@dataclass(frozen=True)
class KeeperMessage:
    """What a keeper says at a time, an object of JSON on a line; a key that is left out says nothing.

    Attributes:
        host: name of its host, said once, with `pid`, `boot` and `time_s`.
        pid: its process.
        boot: its machine (`boot_id`).
        time_s: what its clock shows, seconds since the epoch.
        rank_pid: the rank's process.
        takes_stack_signal: the rank can show its stacks.
        stopped_at_s: since when the rank is stopped (wall clock); 0 where it runs.
        is_over: the rank's program has come to its end in order.
        failure: the rank's record.
        ended: the rank has ended, and the keeper will.
        status: exit code of the rank, negative for a signal.
    """

    host: str | None = None
    pid: int = 0
    boot: str = ""
    time_s: float = 0.0
    rank_pid: int | None = None
    takes_stack_signal: bool = False
    stopped_at_s: float | None = None
    is_over: bool = False
    failure: FailureRecord | None = None
    ended: bool = False
    status: int | None = None


read_message = reader("message of a keeper", LaunchError)(KeeperMessage)


def failure_fields(record: FailureRecord) -> dict[str, Any]:
    """Returns a record as data of a message; what has no UTF-8 form in its texts, as names of files, is escaped."""
    return {
        key: value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value
        for key, value in asdict(record).items()
    }


@dataclass(frozen=True)
class LinkAddress:
    """Where the launcher's door is; it travels to the ranks in their environment.

    Attributes:
        token: secret of the job, in hexadecimal digits.
        boot: the launcher's machine (`boot_id`).
        addresses: of the door, the likeliest first.
    """

    token: str
    boot: str
    addresses: tuple[str, ...]

    def __str__(self) -> str:
        return ",".join((self.token, self.boot, *self.addresses))

    @classmethod
    def parse(cls, text: str) -> LinkAddress:
        """Reads what `str` wrote.

        Raises:
            LaunchError: the text is something else.
        """
        token, boot, rest = [*text.split(",", 2), "", ""][:3]
        addresses = (rest,) if rest.startswith("unix:") else tuple(rest.split(","))  # a path may hold a comma
        is_token = len(token) == 2 * TOKEN_BYTES and set(token) <= set(string.hexdigits)
        if not is_token or not all(address.startswith(("unix:/", "tcp://")) for address in addresses):
            raise LaunchError(f"{LINK.name} is set by the launcher alone; unset it (it holds {text!r})")
        return cls(token, boot, addresses)


class Uplink:
    """The keeper's connection to the launcher; never blocks after it is open.

    Attributes:
        lost: true once the launcher has closed it, or has not been reachable for the limit.
    """

    def __init__(self, address: LinkAddress, rank: int, limit_s: float, start_s: float) -> None:
        self.lost = False
        self._address = address
        self._rank = rank
        self._received = b""
        self._unsent = b""
        self._socket = self._open("keeper", start_s)
        self._socket.setblocking(False)
        # The kernel itself ends the connection when the launcher's machine has confirmed nothing for the limit. (A
        # launcher that is merely stopped, by Ctrl-Z say, is no reason to end the job: its machine still confirms.)
        tune(self._socket, limit_s)
        self.send(host=socket.gethostname(), pid=os.getpid(), boot=boot_id(), time_s=time.time())

    def fileno(self) -> int:
        """Returns the file descriptor to poll for requests."""
        return self._socket.fileno()

    def stream(self, name: str, start_s: float) -> int:
        """Opens another connection, that the launcher reads as this rank's "stdout" or "stderr"; returns its fd."""
        return self._open(name, start_s).detach()

    def send(self, **message: Any) -> None:
        """Sends a message, at the latest with the next one."""
        if len(self._unsent) < _MOST_UNSENT_BYTES:  # a launcher that reads no more needs no more heartbeats
            self._unsent += _line(message)
        self.flush()

    def flush(self, limit_s: float = 0.0) -> None:
        """Sends what has not been sent, waiting for it so long at most."""
        end_s = time.monotonic() + limit_s
        while self._unsent and not self.lost:
            try:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
            except BlockingIOError:
                if time.monotonic() >= end_s:
                    return
                time.sleep(0.01)
            except OSError:
                self.lost = True

    def receive(self) -> list[dict[str, Any]]:
        """Returns the requests that have come; notes if the launcher is lost."""
        try:
            data = self._socket.recv(_LINE_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.lost = True
            return []
        *lines, self._received = (self._received + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Closes this process's end."""
        self._socket.close()

    def _open(self, purpose: str, start_s: float) -> socket.socket:
        """Connects through the launcher's door."""
        try:
            token = bytes.fromhex(self._address.token)
            return enter(self._address.addresses, token, PURPOSES.index(purpose), self._rank, start_s)
        except ConnectionError as error:
            raise LaunchError(
                f"rank {self._rank} on {socket.gethostname()} must reach the launcher, but none of its addresses let "
                f"it in within {start_s:g} s: {error}; let the hosts of a job connect to each other, or name the "
                f"network with --iface"
            ) from None


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"
