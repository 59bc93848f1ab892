"""Agreement: all ranks raise the same error, or none does."""

from __future__ import annotations

import hashlib
import json

import numpy as np

from lowshard import errors
from lowshard.comm.algorithm import ERROR_SIGNATURE
from lowshard.comm.protocol import Communicator
from lowshard.errors import LowshardError, MismatchError

_DIGEST_BYTES = 16


def agree(comm: Communicator, digest: bytes, error: Exception | None = None, what: str = "call") -> None:
    """Return if no rank has an error and all digests are equal; else raise one error on all ranks.

    Collective: all ranks of the communicator call this. It costs one meeting where all is well.

    Args:
        comm: the communicator; its host side (`comm.control`) carries the check.
        digest: what must be the same everywhere; the first 16 bytes count.
        error: what this rank found wrong with its own arguments.
        what: the name of the checked call, for the message.

    Raises:
        LowshardError: a rank had an error: the lowest such rank's, of the same class, on every rank.
        MismatchError: the digests differ.
    """
    control = comm.control
    if control.xp is np:  # else there may be nothing to compare with at once
        same = control._compare(_signature(digest) if error is None else ERROR_SIGNATURE)
        if same and error is None:
            return
    record = np.zeros(_DIGEST_BYTES + 1, np.uint8)
    record[:_DIGEST_BYTES] = np.frombuffer(digest[:_DIGEST_BYTES].ljust(_DIGEST_BYTES, b"\0"), np.uint8)
    record[_DIGEST_BYTES] = error is not None
    rows = share(control, record)
    failed = [rank for rank in range(control.size) if rows[rank][_DIGEST_BYTES]]
    if failed:
        _raise_first(control, failed[0], error, what)
    seen: dict[bytes, list[int]] = {}
    for rank in range(control.size):
        seen.setdefault(rows[rank][:_DIGEST_BYTES].tobytes(), []).append(rank)
    if len(seen) > 1:
        parts = "; ".join(f"ranks {ranks} have {key.hex()[:8]}" for key, ranks in seen.items())
        raise MismatchError(f"{what}: every rank asks for the same thing, but {parts}")


def _signature(digest: bytes) -> int:
    """Return a digest as a signature: positive, below 2^62, and none of the small ones that have a meaning."""
    mixed = hashlib.blake2b(digest[:_DIGEST_BYTES].ljust(_DIGEST_BYTES, b"\0"), digest_size=8).digest()
    return (int.from_bytes(mixed, "little") >> 2) | 16


def share(control: Communicator, record: np.ndarray) -> list[np.ndarray]:
    """Return every rank's record, in rank order; all are of one length.

    Collective: all ranks of the communicator call this.
    """
    xp = control.xp
    send = xp.asarray(record)
    recv = xp.empty((control.size, record.size), record.dtype)
    n = record.size
    # The primitive, not the public call: checks are no traffic of the user's.
    control._all_gather_v(send, recv.reshape(-1), [n] * control.size, [n * i for i in range(control.size)])
    host = recv if isinstance(recv, np.ndarray) else recv.get()
    return list(host)


def share_text(control: Communicator, text: str) -> list[str]:
    """Return every rank's text, in rank order.

    Collective: all ranks of the communicator call this.
    """
    data = text.encode()
    longest = max(int(row[0]) for row in share(control, np.array([len(data)], np.int64)))
    padded = np.frombuffer(data.ljust(longest, b"\0"), np.uint8).copy()
    return [row.tobytes().rstrip(b"\0").decode() for row in share(control, padded)]


def _raise_first(control: Communicator, rank: int, error: Exception | None, what: str) -> None:
    mine = "" if error is None else json.dumps([type(error).__name__, str(error)])
    name, text = json.loads(share_text(control, mine)[rank])
    known = getattr(errors, name, None)
    where = f"{what}: rank {rank}: "
    if isinstance(known, type) and issubclass(known, LowshardError):
        raise known(where + text) from error
    raise LowshardError(f"{where}{name}: {text}") from error
