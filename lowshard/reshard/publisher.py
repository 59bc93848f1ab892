"""`Publisher`: a job offers its tensors, version by version, to jobs that come and go.

```
publish(v)    every rank: agree on v -> copy the sources into a snapshot -> agree that all have
              rank 0:     offer v                      <- from here on v is published; before, nobody has heard of it
subscriber    want -> offer, and the snapshot is kept for it -> copies what it needs -> votes, switches -> done
```

Subscribers fetch; `publish` waits for none of them. What each rank does for them: `version_server`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np

from lowshard.argument import number, truth
from lowshard.comm import Communicator, agree, loopback, share_text
from lowshard.comm.agreement import control_of, share
from lowshard.comm.background import Background
from lowshard.comm.door import Door
from lowshard.comm.interface import addresses_towards, interface_addresses, is_loopback, network_name
from lowshard.comm.work import Stream, Work
from lowshard.errors import CommError, LowshardError, PlanError
from lowshard.layout import Layout
from lowshard.reshard.publication_address import (
    Address,
    FolderLock,
    checked_token,
    folder_door,
    new_token,
    tcp_door,
    write_token,
)
from lowshard.reshard.published_tensors import local_arrays, tensor_layouts
from lowshard.reshard.tensor_layout import TensorLayout
from lowshard.reshard.version_server import Member, Newest, VersionServer
from lowshard.reshard.version_store import MARK_BYTES, VersionStore
from lowshard.reshard.version_wire import Station, Table
from lowshard.reshard.vote import version_number
from lowshard.tiling import Tiling
from lowshard.transfer.device_copies import DeviceCopies

Array = Any
_ANY = ("0.0.0.0", "::")


class Publisher:
    """Offers versions of tensors to subscribers that were started apart from this job.

    A subscriber (`Subscriber`) is a job with any number of ranks, or one process without MPI, that knows the address
    and the token. It joins between versions, leaves, is killed and comes back whenever it likes; it gets the newest
    version, whole, and no other member waits for it. On this publisher's host it copies out of mapped memory, from
    other hosts it reads over TCP, up to LOWSHARD_STREAMS connections for each pair of ranks, all at the same time.

    Each rank keeps one copy of its tensors for the newest version and one for the next, and one more for each
    subscriber that is still copying an older one.

    Collective: all ranks of the communicator make it, publish, and close it. It can be used in a `with` block.

    Args:
        layouts: by name, what the ranks hold: a Layout, a Tiling or a TensorLayout.
        arrays: by name, this rank's local arrays; the same ones serve every version.
        comm: the communicator; None for one rank.
        address: `unix:/folder` for subscribers of this host and user, or `tcp://host:port` (port 0: a free one).
        token: the secret that subscribers must know, 16 bytes or more; by default a new one, in `token_file`.

    Attributes:
        address: what subscribers pass.
        token_file: where the token is kept, a file of mode 0600; None where the caller gave it.

    Every rank raises the same error.

    Raises:
        CommError: the address is not valid, is in use, or leads to one host while ranks are on several; a token too
            short.
        LayoutError: a partial layout.
        BufferMismatchError: an array is not the one its layout says.
        MismatchError: ranks ask for different tensors or addresses.
    """

    def __init__(
        self,
        layouts: Mapping[str, Layout | Tiling | TensorLayout],
        arrays: Mapping[str, Array],
        comm: Communicator | None = None,
        *,
        address: str,
        token: bytes | None = None,
    ) -> None:
        self._alone = loopback(1)[0] if comm is None else None
        whole = self._alone if comm is None else control_of(comm)
        assert whole is not None
        self._closed, self._number = False, 0
        self._version: int | None = None
        self._server: VersionServer | None = None
        self.token_file: Path | None = None
        self._lock: FolderLock | None = None
        self._doors: list[Door] = []
        asked, error = b"", None
        try:
            self._layouts = tensor_layouts(layouts, whole.size)
            self._arrays = local_arrays(self._layouts, arrays, whole.rank)
            self._copies = DeviceCopies(self._arrays.values(), whole.timeout_s)
            where = Address.parse(address)
            given = None if token is None else checked_token(token)
            said = [address, given is None, {n: x.to_json() for n, x in self._layouts.items()}]
            asked = hashlib.blake2b(json.dumps(said, default=list).encode()).digest()
        except LowshardError as found:
            error = found
        agree(whole, asked, error, "Publisher")
        # A communicator of its own: a version may be published by another thread than the caller's.
        self._background = Background(whole, "lowshard publish")
        self._comm: Communicator = self._background.comm
        self._newest = Newest() if self._comm.rank == 0 else None
        try:
            self._open(where, given)
        except BaseException:
            self._let_go()
            raise

    def _open(self, where: Address, given: bytes | None) -> None:
        """Open the doors: those of rank 0 first, then those of the others, who hear of token and address from it."""
        comm, error, facts = self._comm, None, ["", "", "", ""]
        if comm.rank == 0:
            try:
                facts = self._open_first(where, given)
            except LowshardError as found:
                error = found
        agree(comm, b"", error, "Publisher")
        facts = json.loads(share_text(comm, json.dumps(facts))[0])
        self.address, self.token_file = facts[0], Path(facts[3]) if facts[3] else None
        where, token, mark = Address.parse(facts[0]), bytes.fromhex(facts[1]), facts[2]
        if comm.rank:
            try:
                self._doors = [_door_of(where, comm.rank, token)]
            except OSError as found:
                error = CommError(f"rank {comm.rank} cannot be reached by subscribers: {found}")
        networks = share_text(comm, network_name())
        if where.folder is not None and len(set(networks)) > 1:
            error = CommError(
                f"{self.address} leads to one host, and ranks are on several; publish at tcp://host:port"
            )
        agree(comm, b"", error, "Publisher")
        station = Station(
            tuple(a for door in self._doors for a in door.addresses), networks[comm.rank], os.getpid()
        )
        rows = share_text(comm, json.dumps(station.__dict__))
        table = Table(
            mark,
            {name: layout.to_json() for name, layout in self._layouts.items()},
            tuple(Station(**json.loads(row)) for row in rows),
        )
        self._store = VersionStore(
            self._layouts, comm.rank, bytes.fromhex(mark), self._copies, sums=where.folder is None
        )
        self._server = VersionServer(self._doors, self._store, mark, self._newest, table)

    def _open_first(self, where: Address, given: bytes | None) -> list[str]:
        """Open rank 0's door and keep the token; return address, token, mark and token file as text."""
        token = new_token() if given is None else given
        if where.folder is not None:
            self._lock = FolderLock(where.folder)
        try:
            if where.folder is not None:
                self._doors = [folder_door(where.folder, token)]
            else:
                hosts = (where.host,) if where.host not in _ANY else addresses_towards(())
                self._doors = [tcp_door(hosts, where.port, token)]
                where = Address.parse(self._doors[0].addresses[0])
        except OSError as error:
            raise CommError(f"no publisher can be at {where}: {error.strerror or error}") from error
        if given is None:
            self.token_file = where.token_file
            write_token(self.token_file, token)
        return [str(where), token.hex(), secrets.token_bytes(MARK_BYTES).hex(), str(self.token_file or "")]

    # ---- versions

    @property
    def version(self) -> int | None:
        """The version that is offered, or None before the first."""
        return self._version

    def members(self) -> tuple[Member, ...]:
        """Return the subscribers that are in touch, with what they serve. On rank 0; elsewhere nothing."""
        return self._newest.members() if self._newest is not None else ()

    def publish(self, version: int, wait: bool = True, *, stream: Stream = None) -> Work | None:
        """Offer the arrays' present content as a version.

        Collective: all ranks of the communicator call this, with one version. It returns when the arrays may change; it
        waits for no subscriber.

        Args:
            version: an integer from 0 to 2^63 - 1, above the last one.
            wait: False returns a `Work` at once, and the arrays may change when its `wait()` has returned. One at a
                time: the next call of this publisher waits for it. What went wrong in it, and was told to nobody on
                some rank, that call raises, on every rank alike.
            stream: on GPUs, behind whose work the arrays are read, of CuPy or torch; by default the current one of the
                caller, also in the background.

        Every rank raises the same error.

        Raises:
            PlanError: a version that is not such an integer; nothing has changed.
            StreamError: stream is no stream of the arrays' GPU; nothing has changed.
            MismatchError: ranks publish different versions; nothing has changed.
            CommError: there is no memory for a snapshot; the last version stays on offer.
            PeerFailed, TimedOut: a rank did not come. The last version stays on offer where rank 0 lives.
        """
        wait = truth(wait, "wait is True or False", CommError)
        error = self._background.settle()
        try:
            self._copies.follow(stream)
        except LowshardError as found:
            error = error or found
        if wait:
            self._publish(version, error)
            return None
        return self._background.start(lambda: self._publish(version, error), f"publish({version})")

    def _publish(self, version: int, error: Exception | None) -> None:
        """Publish a version, unless a rank is to tell what went wrong with the last one."""
        comm = self._comm
        try:
            if self._closed:
                raise CommError("this Publisher is closed; make a new one")
            version = version_number(version)
            if self._version is not None and version <= self._version:
                raise PlanError(f"versions rise: version {self._version} is out, got {version}")
        except LowshardError as found:
            error, version = error or found, -1
        agree(comm, str(version).encode(), error, "publish")
        held = sorted(self._newest.held()) if self._newest is not None else []
        held = json.loads(share_text(comm, json.dumps(held))[0])
        try:
            self._store.fill(self._arrays, self._number + 1, held)
        except LowshardError as found:
            error = found
        agree(comm, b"", error, "publish")
        self._number, self._version = self._number + 1, version
        if self._newest is not None:
            self._newest.announce(version, self._number)

    # ---- life

    def close(self, timeout_s: float = 30.0) -> None:
        """Let the members that are in touch have the newest version, then end. Closing twice is safe.

        Collective: all ranks of the communicator call this.

        Args:
            timeout_s: how long to wait for members, in seconds.

        Raises:
            LowshardError: what went wrong in the background, and was told to nobody.
        """
        wait_s = number(timeout_s, "timeout_s is a number of seconds, 0 or more", CommError, 0)
        if self._closed:
            return
        error = self._background.settle()
        self._closed = True
        if self._newest is not None and self._version is not None:
            self._newest.wait_until_all_have_it(wait_s)
        with contextlib.suppress(CommError):  # where a rank has failed nobody is waited for
            share(self._comm, np.zeros(1, np.int64))  # the others' snapshots are read until here
        self._let_go()
        if error is not None:
            raise error

    def _let_go(self) -> None:
        if self._newest is not None:
            with self._newest.changed:
                self._newest.closing = True
                self._newest.changed.notify_all()
        if self._server is not None:
            self._server.close()
        else:
            for door in self._doors:
                door.close()
        if self._comm.rank == 0 and self.token_file is not None:
            self.token_file.unlink(missing_ok=True)
        if self._lock is not None:
            self._lock.release()
        self._background.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self.close()
            return
        with contextlib.suppress(LowshardError):  # what ended the block is told
            self.close(0.0)


def _door_of(where: Address, rank: int, token: bytes) -> Door:
    """Return the door of a rank other than 0."""
    if where.folder is not None:
        return folder_door(where.folder / f"rank-{rank}", token)
    own = {address for addresses in interface_addresses().values() for address in addresses}
    if is_loopback(where.host) or where.host in own or where.host in _ANY:
        hosts: tuple[str, ...] = (where.host,)
    else:
        hosts = addresses_towards([where.host])
    return tcp_door(hosts, 0, token)
