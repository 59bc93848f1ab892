"""`apply_deltas`: a checkpoint out of another one and a chain of deltas."""

from __future__ import annotations

import os
from collections.abc import Iterable

from lowshard.argument import brief, items, whole
from lowshard.argument import path as check_path
from lowshard.checkpoint.commit import together
from lowshard.checkpoint.header import FilePath
from lowshard.comm import Communicator, loopback
from lowshard.comm.agreement import control_of
from lowshard.errors import CheckpointError
from lowshard.weights.checkpoint_convert import ConvertReport, Settings, convert


def apply_deltas(
    base: FilePath, deltas: Iterable[FilePath], path: FilePath, comm: Communicator | None = None, *,
    memory_bytes: int = 2_000_000_000,
) -> ConvertReport:  # fmt: skip
    """Put a checkpoint in place that a chain of deltas makes of a base: all of them are applied, or none is.

    Collective: all ranks of the communicator call this, with the same arguments. The base is compared with what the
    first delta stands on, and each link with what it says it makes, before anything is written; what was written is
    read again. Deltas that the base has already are left out. The new checkpoint lies as the base does (sharded alike,
    or whole tensors in one file or a folder).

    Args:
        base: a checkpoint of any form.
        deltas: paths of deltas, or of folders of them.
        path: the folder or file of the new checkpoint; it may be the base's.
        comm: the processes that share the work; None for this one.
        memory_bytes: the most memory of a process.

    Raises:
        CheckpointError: the base is another, a link is missing, a delta is damaged or of another model; nothing has
            changed then. Or the target cannot be written.
        VerificationError: what was written is not what was read.
        NotDurable: the new checkpoint is in place, but its folder could not be synced.
    """
    if comm is None:
        with loopback(1)[0] as alone:
            return apply_deltas(base, deltas, path, alone, memory_bytes=memory_bytes)
    control_of(comm)

    def prepare() -> Settings:
        rule = "deltas are a sequence of paths, at least one"
        given = tuple(
            os.fspath(check_path(d, rule, CheckpointError)) for d in items(deltas, rule, CheckpointError)
        )
        if not given:
            raise CheckpointError(f"{rule}, got none")
        source, target = (
            os.fspath(check_path(p, "a checkpoint is the path of a file or a folder", CheckpointError))
            for p in (base, path)
        )
        number = whole(memory_bytes, "memory_bytes is a number of bytes", CheckpointError)
        return Settings(source, target, None, "", memory_bytes=number, deltas=given)

    return convert(together(comm, brief(path), prepare, "apply_deltas"), comm)
