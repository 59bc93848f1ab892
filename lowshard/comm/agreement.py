"""Agreement: all ranks raise the same error, or none does."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

from lowshard import errors
from lowshard.argument import brief, instance
from lowshard.comm.call_comparison import AGREED, share_texts
from lowshard.comm.communicator import Communicator
from lowshard.errors import CommError, LowshardError, MismatchError, cause_of

_DIGEST_BYTES = 16
_HALVES = struct.Struct("<2Q")
_ODD = 0x9E37_79B9_7F4A_7C15, 0xD6E8_FEB8_6659_FD93
"""Multipliers of a digest's halves; odd, so that no change of a half is lost."""


def control_of(comm: Communicator) -> Communicator:
    """Return the host side of a communicator.

    Raises:
        CommError: it is not a communicator of lowshard.
    """
    try:
        return comm.control
    except AttributeError:
        raise CommError(
            f"comm is a communicator of lowshard, got {brief(comm)}; write lowshard.comm.from_mpi(MPI.COMM_WORLD)"
        ) from None


def agree(
    comm: Communicator,
    digest: bytes,
    error: Exception | None = None,
    what: str = "call",
    said: Callable[[], str] | None = None,
) -> None:
    """Return if no rank has an error and all digests are equal; else raise one error on all ranks.

    Collective: all ranks of the communicator call this. It costs one meeting where all is well.

    Args:
        comm: the communicator; its host side (`comm.control`) carries the check.
        digest: what must be the same everywhere; the first 16 bytes count.
        error: what this rank found wrong with its own arguments.
        what: the name of the checked call, for the message.
        said: returns what the digest is of, in words, for the message where digests differ.

    Raises:
        LowshardError: a rank had an error: the lowest such rank's, of the same class, on every rank.
        MismatchError: the digests differ.
    """
    control = control_of(comm)
    fault = _fault_of(digest, error, what, said)
    if fault is not None:
        digest, error, what, said = b"", fault, "agree", None
    if control._transport.compares:
        # In one order with the calls of the communicator that is asked.
        t, signature = control._transport, _signature(digest)
        with control.turn(what):
            compared = error is None and t.check != "full"
            if compared and t.compare(signature):
                return
            text = f"{what}{AGREED}{digest[:_DIGEST_BYTES].hex()}{_words(said)}"
            rows = t.agree(signature, text, error, compared)
        _raise_if_apart(rows, error, what)
        return
    record = np.zeros(_DIGEST_BYTES + 1, np.uint8)
    record[:_DIGEST_BYTES] = np.frombuffer(digest[:_DIGEST_BYTES].ljust(_DIGEST_BYTES, b"\0"), np.uint8)
    record[_DIGEST_BYTES] = error is not None
    records = share(control, record)
    texts = [f"{what}{AGREED}{row[:_DIGEST_BYTES].tobytes().hex()}" for row in records]
    if any(row[_DIGEST_BYTES] for row in records):
        mine = [] if error is None else [type(error).__name__, str(error)]
        others = [json.loads(text) for text in share_text(control, json.dumps(mine))]
        _raise_if_apart([[text, "", *words] for text, words in zip(texts, others, strict=True)], error, what)
    if len(set(texts)) > 1:
        texts = [text + words for text, words in zip(texts, share_text(control, _words(said)), strict=True)]
    _raise_if_apart([[text, ""] for text in texts], error, what)


def _words(said: Callable[[], str] | None) -> str:
    """Return what a digest is of, as it stands behind it in a text."""
    return "" if said is None else f" {said()}"


def agree_on_plan(
    comm: Communicator,
    digest: bytes,
    error: Exception | None,
    what: str,
    said: Callable[[], str] | None = None,
) -> None:
    """As `agree`, for a plan that may come again and again: GPUs are not kept waiting for it.

    Collective: all ranks of the communicator call this.

    Where calls on a GPU are compared late, so is the digest, and a rank's error reaches the others late. Where there is
    nothing but NCCL to compare over, which stops the host, plans that were agreed on before are not compared again, and
    a rank's error about such a plan is its own. All ranks take the same way: what is remembered follows from the
    agreements that this communicator has made, which succeed on all ranks or on none, are in one order on all, and are
    forgotten by their number alone. Ranks that pass different plans, known here and new there, part at this place: the
    one that compares waits in vain, until its deadline. With a control communicator such plans are told apart.

    Raises:
        As `agree`.
    """
    control_of(comm)
    transport = comm._transport
    if transport.compares:
        agree(comm, digest, error, what, said)
        return
    agree(comm, digest, error, what, said)


def _fault_of(digest: object, error: object, what: object, said: object) -> CommError | None:
    if (
        isinstance(what, str)
        and isinstance(digest, bytes)
        and (error is None or isinstance(error, Exception))
        and (said is None or callable(said))
    ):
        return None
    rule = "agree takes bytes, an exception or None, the name of a call, and a function that returns words or None"
    return CommError(f"{rule}; got {brief(digest)}, {brief(error)}, {brief(what)} and {brief(said)}")


def _raise_if_apart(rows: Sequence[Sequence[str]], error: Exception | None, what: str) -> None:
    """Raise what the rows of all ranks (text, line, error's class and words) demand; the same on all ranks."""
    for rank, row in enumerate(rows):
        if len(row) > 2:
            name, said = row[2:]
            known = getattr(errors, name, None)
            if isinstance(known, type) and issubclass(known, LowshardError):
                is_old = said.startswith(f"{what}: rank ")  # of an earlier call, which nobody has waited for
                raise known(said if is_old else f"{what}: rank {rank}: {said}") from cause_of(error)
            raise LowshardError(f"{what}: rank {rank}: {name}: {said}") from cause_of(error)
    seen: dict[str, list[int]] = {}
    for rank, row in enumerate(rows):
        seen.setdefault(row[0], []).append(rank)
    if len(seen) > 1:
        told = {text: text.partition(AGREED)[2].partition(" ") for text in seen}
        is_told = len({words for _, _, words in told.values()}) == len(seen)
        shown = {
            text: words if is_told else f"{words} (digest {digest[:8]})".lstrip()
            for text, (digest, _, words) in told.items()
        }
        parts = "; ".join(f"ranks {ranks} have {shown[text]}" for text, ranks in seen.items())
        raise MismatchError(f"{what}: every rank asks for the same thing, but {parts}")


def _signature(digest: bytes) -> int:
    """Return a digest as a signature: positive, below 2^62, and none of the small ones that have a meaning."""
    low, high = _HALVES.unpack(digest[:_DIGEST_BYTES].ljust(_DIGEST_BYTES, b"\0"))
    # Any change of one half changes the product's upper bits; every call with a plan comes here.
    mixed = (low * _ODD[0] + high * _ODD[1]) & 0xFFFF_FFFF_FFFF_FFFF
    return int(mixed >> 2) | 16


def share(control: Communicator, record: np.ndarray) -> list[np.ndarray]:
    """Return every rank's record, in rank order; all are of one length.

    Collective: all ranks of the communicator call this.
    """
    xp = control.xp
    send = xp.asarray(record)
    recv = xp.empty((control.size, record.size), record.dtype)
    n = record.size
    # The primitive, not the public call: checks are no traffic of the user's.
    with control.turn("an exchange of records"):
        counts, displs = [n] * control.size, [n * i for i in range(control.size)]
        control._transport.all_gather_v(send, recv.reshape(-1), counts, displs)
    on_device = control._transport.launch is not None
    return list(control._transport.to_host(recv) if on_device else recv)


def trade(
    comm: Communicator, record: np.ndarray, counts: Sequence[int], counts_in: Sequence[int]
) -> np.ndarray:
    """Return what each rank has for this one, in rank order, from what this one has for each.

    Collective: all ranks of the communicator call this. As `share`, it is no traffic of the user's.

    Args:
        comm: the communicator; its host side carries it.
        record: one behind the other, in rank order.
        counts: elements for each rank.
        counts_in: elements of each rank for this one.
    """
    control = control_of(comm)
    xp = control.xp
    send, recv = xp.asarray(record.reshape(-1)), xp.empty(sum(counts_in), record.dtype)
    ends, ends_in = [0, *accumulate(counts)], [0, *accumulate(counts_in)]
    with control.turn("an exchange of records"):
        control.carry(send, counts, ends[:-1], recv, counts_in, ends_in[:-1])
    return control._transport.to_host(recv)


def share_text(control: Communicator, text: str) -> list[str]:
    """Return every rank's text, in rank order.

    Collective: all ranks of the communicator call this.

    Raises:
        CommError: no communicator of lowshard, or no text that UTF-8 can hold.
    """
    control_of(control)
    try:
        instance(text, str, "what is shared is a text", CommError).encode()
    except UnicodeEncodeError as error:
        raise CommError(f"what is shared is a text that UTF-8 can hold, got {brief(text)}") from error
    with control.turn("an exchange of texts"):
        return share_texts(control._transport, text)


def refuse(comm: Communicator, error: LowshardError, what: str) -> None:
    """Tell the other ranks, at their next call of `comm`, that this rank cannot go on; always raises.

    It takes the place of that call: this rank waits for the others here, and all of them raise the error. Where
    calls are not compared (LOWSHARD_CHECK=off) the others learn nothing.

    Args:
        comm: the communicator.
        error: what is wrong on this rank.
        what: what this rank was to do, for the message.

    Raises:
        LowshardError: the error; of the lowest rank where several refuse.
        CommError: an argument of another kind; the others learn nothing.
    """
    control_of(comm)
    instance(error, LowshardError, "error is the LowshardError to raise on all ranks", CommError)
    instance(what, str, "what is the name of a call, a text", CommError)
    with comm.turn(what):
        comm._transport.sequence += 1  # on the others this is a call like any
        comm._transport.refuse(what, error)
