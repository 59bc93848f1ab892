"""`Subscriber`: a job, or one process without MPI, that receives the versions of a `Publisher`.

One `pull`, on every rank:

```
rank 0 asks for a newer version until one is offered or the time is over, and tells the other ranks
each rank fetches its boxes into the arrays that are not served:  mapped memory | connections (`version_fetch`),
                                  only the delta to the served version where that is smaller
all agree that they have them -> vote -> switch -> rank 0 reports done
```

A failure before the vote leaves the served arrays and the version unchanged, unless arrays are written in place.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Self, get_args, overload

import numpy as np

from lowshard.argument import brief, choice, in_words, instance, is_text, number
from lowshard.argument import path as checked_path
from lowshard.comm import Communicator, collective_step, loopback, share_text
from lowshard.comm.agreement import control_of, share
from lowshard.comm.background import Background
from lowshard.comm.listener import connect
from lowshard.comm.work import Stream, Work
from lowshard.content_hash import text_digest
from lowshard.errors import CommError, LowshardError, PeerFailed, PlanError, TimedOut
from lowshard.kernels.buffer import require_results_apart
from lowshard.layout import Layout
from lowshard.reshard.plan_builder import build_reshard_plan
from lowshard.reshard.publication_address import Address, checked_token, read_token
from lowshard.reshard.published_tensors import tensor_layouts
from lowshard.reshard.rank_side import require_cast
from lowshard.reshard.refit import Buffering, Vote
from lowshard.reshard.tensor_layout import TensorLayout
from lowshard.reshard.version_fetch import ENTER_S, Fetched, FetchRequest, Source
from lowshard.reshard.version_target import target_sets
from lowshard.reshard.version_wire import (
    CONTROL,
    STALLED_S,
    WANT_S,
    Answer,
    Connection,
    ConnectionLost,
    Endpoint,
    Greeting,
    Request,
    Table,
    read_answer,
    read_table,
    text_of,
)
from lowshard.tiling import Tiling
from lowshard.transfer.transform_contract import ReshardTransform

Array = Any
_TURN_S = 1.0


class _Served(NamedTuple):
    """The set that is served, its version, and whether it is a mix. Replaced as one."""

    at: int = 0
    version: int | None = None
    torn: bool = False


class _Snapshot(NamedTuple):
    """The snapshot a set holds: its publisher's id and its number; empty by default."""

    publisher_id: str = ""
    number: int = 0


class Subscriber:
    """Takes versions from a publisher that was started apart, each whole or not at all.

    It may be made before its publisher, and outlive it: `pull` connects when it is called, and again after a publisher
    was restarted. A second set of arrays is made beside `out`; a version is written to the set that is not served, and
    switched to when all ranks have it ("double"). "in_place" writes into `out`, whose addresses stay, for half the
    memory: from the first byte to the switch `weights` are `torn`, and so they stay where a pull fails after an offer;
    the next pull takes a whole version again. Where a rank of the subscriber dies, survivors of one host are on one
    version.

    Collective: all ranks of the communicator make it, pull, and close it. It can be used in a `with` block.

    Args:
        layouts: by name, what this job's ranks hold: a Layout, a Tiling or a TensorLayout, with this job's own rank
            numbers; some or all of the publisher's tensors.
        out: by name, this rank's local arrays, on the host or on a GPU.
        comm: the communicator; None for one process.
        address: of the publisher.
        token: the publisher's.
        token_file: a file with it; by default where the publisher keeps it, if it is on this host or the cache folder
            is shared.
        delta: "auto": a connection carries only what differs, bit by bit, from the served version, or a whole tensor
            where that is less or the publisher no longer has that version. "off": always whole tensors. From mapped
            memory everything is copied. Do not write to the arrays between versions: deltas are applied to them.
        name: what the publisher's `members()` shows.
        transform: applied to this rank's tensors as they arrive, such as an `MXFP8ReshardTransform`: a tensor that it
            stores has no array in `out`, and `weights` has its buffers. The second set is made by its `twin()`. Deltas
            consist of whole blocks of the transform, 32 elements for MXFP8, and need boxes aligned to them.
        buffering: "double", two sets; or "in_place", as for a CUDA graph, or where `out` has slices of fused tensors.

    Every rank raises the same error.

    Raises:
        CommError: the address is not valid; a token that is too short, or both token and token_file.
        LayoutError, BufferMismatchError: as for `Publisher`.
        PlanError, KernelError: the transform has no twin, no buffer for a tensor, or takes it in another form than it
            is published in.
        MismatchError: ranks ask for different tensors or addresses.
    """

    def __init__(
        self,
        layouts: Mapping[str, Layout | Tiling | TensorLayout],
        out: Mapping[str, Array],
        comm: Communicator | None = None,
        *,
        address: str,
        token: bytes | None = None,
        token_file: str | Path | None = None,
        delta: Literal["auto", "off"] = "auto",
        name: str = "",
        transform: ReshardTransform | None = None,
        buffering: Buffering = "double",
    ) -> None:
        self._alone = loopback(1)[0] if comm is None else None
        whole = self._alone if comm is None else control_of(comm)
        assert whole is not None
        with collective_step(whole, "Subscriber") as step:
            self._layouts = tensor_layouts(layouts, whole.size)
            choice(buffering, get_args(Buffering), "buffering is 'double' or 'in_place'", PlanError)
            in_place = buffering == "in_place"
            self._sets = target_sets(self._layouts, out, transform, whole.rank, whole.timeout_s, in_place)
            self._address = Address.parse(address)
            if self._address.folder is None and not self._address.port:
                raise CommError(
                    f"a subscriber is given the port that its publisher has, as publisher.address says, got {address!r}"
                )
            if token is not None and token_file is not None:
                raise CommError("a subscriber is given token or token_file, not both")
            self._token = None if token is None else checked_token(token)
            rule = "token_file is the path of a publisher's token"
            self._token_file = (
                self._address.token_file if token_file is None else checked_path(token_file, rule, CommError)
            )
            choice(delta, ("auto", "off"), "delta of a Subscriber is 'auto' or 'off'", CommError)
            instance(name, str, "name of a Subscriber is text", CommError)
            if not is_text(name):
                raise CommError(f"name of a Subscriber is text that UTF-8 can write, got {brief(name)}")
            tables = {n: x.to_json() for n, x in self._layouts.items()}
            step.digest = text_digest(json.dumps([address, name, delta, buffering, tables], default=list))
            words = f"{address}, name {name!r}, delta {delta}, {buffering}, {in_words(self._layouts)}"
            step.said = lambda: words
        # A communicator of its own: a version is taken beside what the caller does, over any other one.
        self._background = Background(whole, "lowshard pull")
        self._comm: Communicator = self._background.comm
        self._greeting = Greeting(name, socket.gethostname(), os.getpid(), self._comm.size)
        self._pid = os.getpid()
        self._now = _Served()
        self._holds = [_Snapshot() for _ in self._sets]
        self._delta_invalid = False  # a delta did not fit: the next version is fetched whole
        """By set: the served set is whole; the other holds the version before, or nothing."""
        self._delta, self._fetched = delta, Fetched()
        self._attempt, self._closed, self._pulls = 0, False, False
        self._leaving = threading.RLock()
        """Guards `_pulls` and `_closed`: exactly one of two threads releases everything."""
        self._patience_s = self._comm.timeout_s / 2 if self._comm.size > 1 else STALLED_S
        """How long rank 0 may wait for the publisher, or a rank may fetch, between two collective calls."""
        self._control: Connection | None = None
        self._table_text, self._offers, self._tried, self._proven = "", "", b"", b""
        self._source: Source | None = None
        self._vote = Vote(self._comm)

    def __repr__(self) -> str:
        served = "no version" if self.version is None else f"version {self.version}"
        state = ", closed" if self._closed else ""
        return f"<Subscriber of {self._address}: {served} of {len(self._layouts)} tensors{state}>"

    # ---- what is served

    @property
    def version(self) -> int | None:
        """The version of `weights`, or None before the first."""
        return self._now.version

    @property
    def weights(self) -> Mapping[str, Array]:
        """What holds the version that is served, by name: arrays of the library of `out`, and what a transform stores
        tensors in. Ask again after each pull: two sets alternate, unless all is written in place.
        """
        return MappingProxyType(self._sets[self._now.at].weights)

    @property
    def torn(self) -> bool:
        """Whether `weights` are a mix of versions: only "in_place", while a version comes and after one that failed."""
        return self._now.torn

    def report(self) -> dict[str, int]:
        """Return what the last version cost this rank. Not collective.

        - `dense_bytes`: bytes of all its boxes.
        - `received_bytes`: bytes received over connections.
        - `changed_elems`: elements received that differ from the version before; all of those received whole.
        """
        return asdict(self._fetched)

    # ---- a version

    @overload
    def pull(
        self, timeout_s: float | None = None, *, wait: Literal[True] = True, stream: Stream = None
    ) -> int: ...

    @overload
    def pull(
        self, timeout_s: float | None = None, *, wait: Literal[False], stream: Stream = None
    ) -> Work: ...

    @overload
    def pull(self, timeout_s: float | None = None, *, wait: bool, stream: Stream = None) -> int | Work: ...

    def pull(self, timeout_s: float | None = None, *, wait: bool = True, stream: Stream = None) -> int | Work:
        """Wait for a version newer than this one, take it, and return its number.

        Collective: all ranks of the communicator call this. A publisher that was restarted begins anew: of another
        publisher at the address the newest version is taken, whatever its number.

        With `wait=False` a thread does all of it, and a `Work` is returned at once: its `wait()` returns the number or
        raises the error. Threads may read `weights` meanwhile: the switch is a swap of references, and what they hold
        stays whole until the pull after the next one begins; "in_place" it is torn. Each rank chooses for itself. One
        version at a time: the next pull, and `close`, wait for it, and raise on every rank an error of it that no call
        has raised. The process does not end before it has.

        Args:
            timeout_s: how long to wait for an offer, in seconds; by default the communicator's. Fetching may take
                longer, and a publisher that has stopped answering is given up to 12 s.
            wait: False does it in the background.
            stream: on GPUs, behind whose work the arrays that are not served are written, of CuPy or torch; by default
                the current one of the caller, also in the background.

        Every rank that lives raises the same error.

        Raises:
            TimedOut: no newer version was offered, or no publisher answered; `weights` stay.
            PeerFailed: the publisher has gone, or a rank of either job; `weights` stay, but where they are written in
                place and a version had begun to come (`torn`); the next pull tries again.
            PlanError, CommError: the publisher lacks a tensor that is wanted, or has it in another shape or dtype.
            StreamError: stream is no stream of the arrays' GPU; nothing has changed.
        """
        if os.getpid() != self._pid:
            raise CommError(
                f"a Subscriber is its process's, {self._pid}, and this is a forked child of it; make one here"
            )
        if self._closed:  # so is its communicator: the ranks cannot agree
            raise CommError("this Subscriber is closed; make a new one")
        error = self._background.settle()
        limit_s = 0.0
        try:
            wait = instance(wait, bool, "wait of pull is True or False", CommError)
            rule = "timeout_s is a number of seconds, 0 or more"
            limit_s = self._comm.timeout_s if timeout_s is None else number(timeout_s, rule, CommError, 0)
            self._sets[0].copies.follow(stream)
        except LowshardError as found:
            wait, error = True, error or found
        if wait:
            return self._pull(limit_s, error)
        return self._background.start(lambda: self._pull(limit_s, error), "pull")

    def _pull(self, limit_s: float, error: Exception | None) -> int:
        """Pull a version, or raise a pending error on all ranks."""
        with self._leaving:
            self._pulls = True
        try:
            return self._taken(limit_s, error)
        except LowshardError:  # perhaps only because this was closed
            self._check_open()
            raise
        finally:
            with self._leaving:
                self._pulls = False
                if self._closed:  # closed by another thread, which left this to this one
                    self._release()

    def _taken(self, limit_s: float, error: Exception | None) -> int:
        """Receive a version and switch to it; return its number."""
        with collective_step(self._comm, "pull") as step:
            step.error = error
        offer = self._offered(time.monotonic() + limit_s, limit_s)
        self._attempt += (
            1  # before the collective calls, so that ranks count alike even if one is interrupted
        )
        fetched = self._fetch(offer)
        if not self._vote.decide(self._attempt, True):
            raise PeerFailed(
                f"another rank noticed a failure during the vote on version {offer.version}: version "
                f"{self.version} stays"
            )
        assert self._source is not None
        at = self._next
        self._holds[at] = _Snapshot(self._source.publisher_id, offer.number)
        self._now = _Served(at, offer.version)
        self._fetched = fetched
        self._tell(Request("done", number=offer.number, version=offer.version))
        return offer.version

    def _offered(self, end_s: float, limit_s: float) -> Answer:
        """Return the offer, the same on all ranks, with `_source` ready for it; or raise on all."""
        while True:
            said: dict[str, Any] = {}
            if self._comm.rank == 0:
                said = self._asked(end_s)
            said = json.loads(share_text(self._comm, json.dumps(said))[0])
            if "table" in said:
                self._take_table(*said["table"])
                continue
            if "error" in said:
                kind, text = said["error"]
                raise {"PeerFailed": PeerFailed, "TimedOut": TimedOut}.get(kind, CommError)(text)
            if "offer" in said:
                return read_answer.text(said["offer"])
            if said["over"] and "why" in said:
                raise TimedOut(f"no publisher answers at {self._address}: {said['why']}")
            if said["over"]:
                newer = "" if self.version is None else f" newer than {self.version}"
                raise TimedOut(f"no version{newer} was offered at {self._address} within {limit_s:g} s")

    def _asked(self, end_s: float) -> dict[str, Any]:
        """Ask the publisher once; return what to tell the other ranks. On rank 0."""
        said: dict[str, Any] = {}
        try:
            self._check_open()
            if self._control is None:
                why = self._connect(end_s)
                if why is None:
                    return {"table": [self._table_text, self._proven.hex()]}
                return {"why": why, "over": time.monotonic() >= end_s}
            newer = self.version if self._offers == self._holds[self._now.at].publisher_id else None
            wait_s = min(WANT_S, max(0.0, end_s - time.monotonic()))
            self._control.send_message(Request("want", self._offers, newer, wait_s))
            answer_s = min(WANT_S + _TURN_S + STALLED_S / 3, self._patience_s)
            answer = self._control.receive_message(read_answer, time.monotonic() + answer_s)
            if answer.state == "here":
                said["offer"] = text_of(answer)
            elif answer.state == "closed":
                raise PeerFailed(f"the publisher at {self._address} has closed")
        except ConnectionLost as lost:
            self._disconnect()
            said["error"] = ["PeerFailed", f"the publisher at {self._address} has gone: {lost}"]
        except LowshardError as found:
            self._disconnect()
            said["error"] = [type(found).__name__, str(found)]
        except BaseException:  # Ctrl-C: the next request must not receive this answer
            self._disconnect()
            raise
        said["over"] = time.monotonic() >= end_s
        return said

    def _connect(self, end_s: float) -> str | None:
        """Connect and receive the publisher's table; return why that failed, after some tries."""
        if self._comm.size > 1:
            end_s = min(end_s, time.monotonic() + min(ENTER_S, self._patience_s))
        while True:
            self._check_open()
            left_s = max(0.05, end_s - time.monotonic())
            try:
                conn = Connection(
                    connect([self._address.listener], self._next_token, CONTROL, 0, min(ENTER_S, left_s))
                )
                break
            except (ConnectionError, CommError) as error:
                if time.monotonic() >= end_s:
                    return str(error)
                time.sleep(min(0.05, left_s))
        self._control = conn
        self._check_open()  # `close` may have come before it could see the connection
        conn.send_message(self._greeting)
        table: Table = conn.receive_message(read_table, time.monotonic() + min(STALLED_S, self._patience_s))
        self._offers = table.publisher_id
        self._table_text = text_of(table)
        self._proven = self._tried
        return None

    def _next_token(self) -> bytes:
        """Return the token for one try: the user's, or the one in the file now."""
        if self._token is not None:
            self._tried = self._token
        elif self._token_file == self._address.token_file:
            self._tried = read_token(self._token_file, self._address.no_token)
        else:
            self._tried = read_token(self._token_file)
        return self._tried

    def _check_open(self) -> None:
        """Raise CommError if another thread has closed this."""
        if self._closed:
            raise CommError("this Subscriber was closed while it waited for a version")

    def _take_table(self, text: str, token: str) -> None:
        """Plan the fetch from a publisher's table; all ranks do so from the same text."""
        self._drop_source()
        try:
            with collective_step(self._comm, "pull"):
                table = read_table.text(text)
                self._proven = bytes.fromhex(token)
                have = {name: TensorLayout.from_json(layout) for name, layout in table.layouts.items()}
                self._source = self._planned(table.publisher_id, table.endpoints, have)
        except LowshardError:  # all ranks reconnect
            self._disconnect()
            self._drop_source()
            raise

    def _drop_source(self) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None

    def _planned(
        self, publisher_id: str, endpoints: Sequence[Endpoint], have: Mapping[str, TensorLayout]
    ) -> Source:
        """Return the source for a publisher's tensors."""
        ranks = len(endpoints)
        plan = build_reshard_plan(have, {n: x.shifted(ranks) for n, x in self._layouts.items()})
        for entry in plan.entries:
            require_cast(entry, self._sets[0].transform)
            for one in self._sets:
                one.expect(entry.name, entry.src.dtype, entry.dst.dtype)
        for move in plan.for_rank(ranks + self._comm.rank).incoming:
            refused = self._sets[0].targets[plan.entries[move.entry].name].refuses(move.dst_box)
            if refused is not None:
                raise PlanError(refused)
        fed = {entry.name: entry.src_name for entry in plan.entries}
        require_results_apart(self._sets[0].memory, self._comm.rank, lambda a, b, _: fed[a] == fed[b])
        return Source(publisher_id, endpoints, self._proven, have, plan, ranks + self._comm.rank)

    @property
    def _next(self) -> int:
        """The set that the next version is written to."""
        return (self._now.at + 1) % len(self._sets)

    def _number_in(self, at: int) -> int:
        """Return the snapshot of the present publisher that a set holds, or 0."""
        found = self._holds[at]
        return (
            found.number
            if self._source is not None and self._source.publisher_id == found.publisher_id
            else 0
        )

    def _fetch(self, offer: Answer) -> Fetched:
        """Fill the arrays that are not served, or raise on all ranks."""
        source = self._source
        assert source is not None
        since = self._number_in(self._now.at) if self._delta == "auto" and not self._delta_invalid else 0
        at = self._next
        served, target, behind = self._sets[self._now.at], self._sets[at], 0
        if served is target:
            self._now = self._now._replace(torn=True)
        else:
            behind = self._number_in(at)
        self._holds[at] = _Snapshot()
        wanted = FetchRequest(offer.number, target.targets, since, served.targets, behind)

        def take() -> Fetched:
            target.begin()
            found = source.fetch(wanted)
            target.end()
            self._check_open()
            return found

        fetched = Fetched()
        try:
            fetched, found = self._in_turns(take, source.stop)
            with collective_step(self._comm, "pull") as step:
                if isinstance(found, ConnectionLost):
                    left = "weights are torn" if self.torn else f"version {self.version} stays"
                    step.error = PeerFailed(f"version {offer.version} did not arrive: {found}; {left}")
                elif found is not None:  # tell the other ranks, which wait
                    text = f"version {offer.version} was not taken: {type(found).__name__}: {found}"
                    step.error = CommError(text)
            self._delta_invalid = False
        except LowshardError as agreed:
            self._delta_invalid = since > 0 and type(agreed) is CommError  # not for a failed rank
            if not self._vote.decide(self._attempt, False):
                self._disconnect()
                raise
            # The others switched before one of them died: so does this rank.
        return fetched

    def _in_turns(
        self, take: Callable[[], Fetched], stop: Callable[[], object]
    ) -> tuple[Fetched, Exception | None]:
        """Fetch in a thread, while the ranks meet until all have ended; return what came or the error."""
        result: tuple[Fetched, Exception | None] = Fetched(), None

        def run() -> None:
            nonlocal result
            try:
                result = take(), None
            except Exception as error:
                result = Fetched(), error

        if self._comm.size == 1:
            run()
            return result
        thread = threading.Thread(target=run, name="lowshard pull", daemon=True)
        thread.start()
        try:
            is_busy = True
            while is_busy:
                thread.join(min(_TURN_S, self._patience_s))
                is_busy = any(share(self._comm, np.array([thread.is_alive()], np.int64)))
        except BaseException:
            stop()
            thread.join()
            raise
        return result

    def _tell(self, request: Request) -> None:
        """Send the publisher a message, on rank 0."""
        if self._control is not None:
            try:
                self._control.send_message(request)
            except ConnectionLost:
                self._disconnect()

    def _disconnect(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None

    # ---- life

    def close(self) -> None:
        """Wait for a version that is under way, and disconnect; `weights` stay readable. Closing twice is safe.

        Collective: all ranks of the communicator call this.

        Raises:
            LowshardError: a pending error of a background pull.
        """
        if self._closed:
            return
        error = self._background.settle()
        self._leave()
        with contextlib.suppress(CommError):  # after a rank's death the process's end does it
            self._background.close()
        if self._alone is not None:
            self._alone.close()
        if error is not None:
            raise error

    def _leave(self) -> None:
        """Release everything; a pull in another thread is told to end, and releases it then."""
        with self._leaving:
            self._closed = True
            if not self._pulls:
                self._release()
                return
            control, source = self._control, self._source
        if control is not None:
            control.stop()
        if source is not None:
            source.stop()

    def _release(self) -> None:
        self._disconnect()
        self._drop_source()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
            return
        # The other ranks may not come here, and what is under way has a deadline of its own.
        self._leave()
        self._comm.__exit__(type(error), error, None)
