"""Agreement: after a part of a call that each rank does alone, all ranks go on, or all raise the same error."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import Any, Self
from weakref import WeakKeyDictionary

import numpy as np

from lowshard import errors
from lowshard.argument import brief, instance
from lowshard.comm.call import source_line
from lowshard.comm.call_comparison import AGREED, ERROR_SIGNATURE, share_texts, verdict
from lowshard.comm.communicator import Communicator
from lowshard.comm.transport import Transport
from lowshard.errors import CommError, LowshardError, cause_of

_DIGEST_BYTES, _MOST_KEPT = 16, 4096
_agreed_before: WeakKeyDictionary[Transport, set[int]] = WeakKeyDictionary()
"""By transport that compares nothing without stopping a GPU, what its ranks have agreed on."""


def control_of(comm: Communicator) -> Communicator:
    """Return the host side of a communicator; raise CommError for what is none."""
    try:
        return comm.control
    except AttributeError:
        raise CommError(
            f"comm is a communicator of lowshard, got {brief(comm)}; write lowshard.comm.from_mpi(MPI.COMM_WORLD)"
        ) from None


class collective_step:
    """A block that each rank runs by itself; at its end all ranks go on, or all raise the same error.

    Collective: all ranks of the communicator enter it. It costs one meeting where all is well. Ctrl-C leaves without.

    Args:
        comm: the communicator; its host side (`comm.control`) carries the meeting. None for one rank alone.
        what: the name of the call, equal on all ranks.
        digest: what must be equal on all ranks, where no rank has an error; the first 16 bytes count.
        said: returns what the digest is of, in words, for the message where digests differ.
        path: the files that the block reads or writes: what the system refuses is a CheckpointError that names them.
        meets: the ranks meet inside, too: what may fail between goes through `attempt`; what is raised leaves at once.
        once: over NCCL alone, where a meeting stops the GPU, ranks do not meet again for what they have agreed on.

    The block may set `digest`, `said`, and `error`: what it has kept, to be raised at its end.

    Raises:
        LowshardError: a rank had an error: that of the lowest such rank, of its class where it is one of ours.
        MismatchError: digests differ, or some ranks make another call.
        PeerFailed, TimedOut: a rank has failed, or did not come; the text names the call.
    """

    __slots__ = ("_comm", "_meets", "_once", "_path", "_what", "digest", "error", "said")

    def __init__(
        self, comm: Communicator | None, what: str, digest: bytes = b"", said: Callable[[], str] | None = None, *,
        path: object = None, meets: bool = False, once: bool = False,
    ) -> None:  # fmt: skip
        self._comm = None if comm is None else control_of(comm)
        if not isinstance(what, str):
            raise CommError(f"what is the name of a call, a text, got {brief(what)}")
        self._what = what
        self.digest, self.said, self._path, self._meets, self._once = digest, said, path, meets, once
        self.error: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def attempt(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call a function and keep its error for the end of the block; do nothing where there is one already."""
        if self.error is None:
            try:
                return call(*args)
            except Exception as error:
                self.error = error
        return None

    def __exit__(self, kind: object, raised: BaseException | None, trace: object) -> None:
        if raised is not None and (self._meets or not isinstance(raised, Exception)):
            return
        error, what = raised if self.error is None else self.error, self._what
        if self._path is not None and isinstance(error, OSError) and not isinstance(error, LowshardError):
            where = self._path if isinstance(self._path, str | Path) else brief(self._path)
            error, cause = errors.CheckpointError(f"{where}: {what} failed: {error}"), error
            error.__cause__ = cause
        if self._comm is None:
            if error is not None and error is not raised:
                raise error
            return
        t, rows = self._comm._transport, list[list[str]]()
        with self._comm.turn(what), naming(what):
            signature, digest = ERROR_SIGNATURE, b""
            if error is None:
                digest = self.digest[:_DIGEST_BYTES]
                signature = _signature(what, digest)
            if not (t.size == 1 or self._is_same(t, signature)) or error is not None:
                said = self.said() if error is None and self.said is not None else ""
                wrong = [] if error is None else [type(error).__name__, str(error)]
                mine = [f"{what}{AGREED}{digest.hex()} {said}", source_line(), *wrong]
                rows = [json.loads(row) for row in share_texts(t, json.dumps(mine))]
        if rows:
            raise _verdict(rows, t.sequence) from cause_of(error)

    def _is_same(self, t: Transport, signature: int) -> bool:
        """Return, on all ranks alike, whether all have this signature."""
        if t.check == "full":
            return len(set(share_texts(t, f"{self._what}{AGREED}{signature}"))) == 1
        if t.compares:
            return t.compare(signature)
        before = _agreed_before.setdefault(t, set()) if self._once else set()
        if signature not in before:
            if (t.gather_facts(np.array([signature], np.int64)) != signature).any():
                return False
            if len(before) < _MOST_KEPT:
                before.add(signature)
        return True


@lru_cache(_MOST_KEPT)
def _signature(what: str, digest: bytes) -> int:
    signed = blake2b(what.encode() + b"\0" + digest, digest_size=8).digest()
    return int.from_bytes(signed, "little") >> 2 | 16  # no small one, which has a meaning


def _verdict(rows: Sequence[Sequence[str]], sequence: int) -> LowshardError:
    """Return the one error for what all ranks came with: text, source line and an error's class and words."""
    calls = [row[0].partition(AGREED) for row in rows]
    asked = [(what, agreed, *rest.partition(" ")[::2]) for what, agreed, rest in calls]
    if not all(agreed for _, agreed, *_ in asked):  # some rank makes a plain call
        return verdict(rows, sequence + 1)
    for rank, (row, (what, *_)) in enumerate(zip(rows, asked, strict=True)):
        if len(row) > 2:
            cls, begin = getattr(errors, row[2], None), f"{what}: rank "
            kind = cls if isinstance(cls, type) and issubclass(cls, LowshardError) else LowshardError
            said = row[3] if kind is cls else f"{row[2]}: {row[3]}"
            is_told = said.startswith(begin)  # of an earlier call, which nobody has waited for
            return kind(said if is_told else f"{begin}{rank}: {said}")
    is_told = len({(what, said) for what, *_, said in asked}) == len(set(asked))
    ranks: dict[str, list[int]] = {}
    for rank, (what, _, digest, said) in enumerate(asked):
        ranks.setdefault((said or what) + f" (digest {digest[:8]})" * (not is_told), []).append(rank)
    parts = "; ".join(f"ranks {some} have {shown}" for shown, some in ranks.items())
    return errors.MismatchError(f"{asked[0][0]}: every rank asks for the same thing, but {parts}")


class naming(AbstractContextManager[None]):
    """Has errors of ranks that did not come, or have failed, name the call that this rank was in."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __exit__(self, kind: object, raised: BaseException | None, trace: object) -> None:
        if isinstance(raised, (errors.PeerFailed, errors.TimedOut)):
            raised.args = (f"{self._what}: {raised}",)


def share(
    control: Communicator, record: np.ndarray, what: str = "an exchange of records"
) -> list[np.ndarray]:
    """Return every rank's record, in rank order; all are of one length. It is no traffic of the user's.

    Collective: all ranks of the communicator call this.
    """
    with control.turn(what), naming(what):
        t, xp, n, size = control._transport, control.xp, record.size, control.size
        recv = xp.empty((size, n), record.dtype)
        t.all_gather_v(xp.asarray(record), recv.reshape(-1), [n] * size, [n * i for i in range(size)])
        return list(recv if xp is np else t.to_host(recv))


def trade(
    comm: Communicator, record: np.ndarray, counts: Sequence[int], counts_in: Sequence[int]
) -> np.ndarray:
    """Return what each rank has for this one, in rank order, from what this one has for each.

    Collective: all ranks of the communicator call this.
    """
    control = control_of(comm)
    xp = control.xp
    send, recv = xp.asarray(record.reshape(-1)), xp.empty(sum(counts_in), record.dtype)
    ends, ends_in = [0, *accumulate(counts)], [0, *accumulate(counts_in)]
    with control.turn("an exchange of records"):
        control.carry(send, counts, ends[:-1], recv, counts_in, ends_in[:-1])
    return control._transport.to_host(recv)


def share_text(control: Communicator, text: str) -> list[str]:
    """Return every rank's text, in rank order; raise CommError for what UTF-8 cannot hold.

    Collective: all ranks of the communicator call this.
    """
    control_of(control)
    try:
        instance(text, str, "what is shared is a text", CommError).encode()
    except UnicodeEncodeError as error:
        raise CommError(f"what is shared is a text that UTF-8 can hold, got {brief(text)}") from error
    with control.turn("an exchange of texts"):
        return share_texts(control._transport, text)
