"""Cases of the communicator contract: all ranks raise one error, or none does."""

from __future__ import annotations

import hashlib

import numpy as np
from support.comm_kit import case, get, outcome, put, told

from lowshard import errors
from lowshard.comm import Communicator, collective_step
from lowshard.comm.agreement import share, share_text
from lowshard.errors import LowshardError, MismatchError


def agree(comm: Communicator, digest: bytes, error: Exception | None, what: str) -> None:
    """Meet with a digest, or an error that the block raises."""
    with collective_step(comm, what) as step:
        step.digest = digest
        if error is not None:
            raise error


def equal_everywhere(comm: Communicator, text: str) -> bool:
    """Return whether all ranks hold one text, by a collective that moves fixed-size digests."""
    mine = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8).copy()
    recv = put(comm, np.zeros((comm.size, 32), np.uint8))
    comm.all_gather(put(comm, mine), recv)
    return len({row.tobytes() for row in get(recv)}) == 1


@case()
def agreement_passes_where_all_agree(comm: Communicator, rng: np.random.Generator) -> None:
    for digest in (b"", b"short", bytes(range(16)), bytes(range(16)) + b"what follows does not count"):
        agree(comm, digest, None, "this call")
    tail = bytes(range(16)) + bytes([comm.rank])
    agree(comm, tail, None, "this call")


@case()
def an_error_of_any_rank_is_raised_on_all(comm: Communicator, rng: np.random.Generator) -> None:
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, LowshardError)]
    for i, cls in enumerate(classes):
        bad = i % comm.size
        with told(cls=cls.__name__, rank=bad):
            error = (
                cls(f"the rule; rank {comm.rank} \N{RIGHTWARDS ARROW} wrong") if comm.rank == bad else None
            )
            name, text = outcome(lambda error=error: agree(comm, b"same", error, "plan of w"))
            assert name == cls.__name__
            assert text == f"plan of w: rank {bad}: the rule; rank {bad} \N{RIGHTWARDS ARROW} wrong"
            assert equal_everywhere(comm, name + text)
    agree(comm, b"same", None, "the next call")


@case()
def of_several_errors_the_lowest_ranks_is_raised_on_all(comm: Communicator, rng: np.random.Generator) -> None:
    bad = sorted(int(r) for r in rng.permutation(comm.size)[: max(1, comm.size - 1)])
    kinds = [errors.PlanError, errors.BufferMismatchError, errors.MeshError]
    error = kinds[comm.rank % 3](f"from {comm.rank}" * (comm.rank + 1)) if comm.rank in bad else None
    # Digests differ too; the error is the better news.
    name, text = outcome(lambda: agree(comm, bytes([comm.rank]), error, "fill"))
    assert name == kinds[bad[0] % 3].__name__
    assert text == f"fill: rank {bad[0]}: " + f"from {bad[0]}" * (bad[0] + 1)
    assert equal_everywhere(comm, name + text)


@case()
def an_error_of_no_class_of_ours_becomes_a_lowshard_error(
    comm: Communicator, rng: np.random.Generator
) -> None:
    class OwnError(errors.PlanError):
        pass

    last = comm.size - 1
    for error in (ValueError("no such dim"), KeyError("w"), OwnError("mine"), RuntimeError("")):
        with told(error=repr(error)):
            mine = error if comm.rank == last else None
            name, text = outcome(lambda mine=mine: agree(comm, b"", mine, "load"))
            assert name == "LowshardError"
            assert text == f"load: rank {last}: {type(error).__name__}: {error}"
            assert equal_everywhere(comm, name + text)


@case()
def different_digests_are_a_mismatch_on_all(comm: Communicator, rng: np.random.Generator) -> None:
    if comm.size == 1:
        return
    for odd in range(comm.size):
        with told(odd=odd):
            digest = hashlib.sha256(b"other" if comm.rank == odd else b"one").digest()
            name, text = outcome(lambda digest=digest: agree(comm, digest, None, "execute"))
            assert name == MismatchError.__name__
            assert text.startswith("execute: ")
            assert f"[{odd}]" in text
            assert str([r for r in range(comm.size) if r != odd]) in text
            assert equal_everywhere(comm, name + text)
    # The last byte that counts, and a digest that differs from a shorter one by a zero byte only.
    name, _ = outcome(lambda: agree(comm, bytes(15) + bytes([comm.rank]), None, "x"))
    assert name == MismatchError.__name__


@case()
def records_and_texts_are_shared_in_rank_order(comm: Communicator, rng: np.random.Generator) -> None:
    control = comm.control
    rows = share(control, np.array([comm.rank, -comm.rank]))
    assert [list(map(int, row)) for row in rows] == [[r, -r] for r in range(comm.size)]
    texts = ["", "a\0", "\N{GREEK SMALL LETTER ALPHA}" * 40, "x" * 5000]
    for first in range(4):
        said = share_text(control, texts[(comm.rank + first) % 4])
        assert said == [texts[(r + first) % 4] for r in range(comm.size)]
    assert share_text(control, "") == [""] * comm.size


@case()
def control_is_over_host_memory_and_the_same_ranks(comm: Communicator, rng: np.random.Generator) -> None:
    control = comm.control
    assert (control.rank, control.size) == (comm.rank, comm.size)
    if comm.xp is np and comm.transport not in ("nccl", "staged"):
        assert control is comm
