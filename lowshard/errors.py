"""Every error class of lowshard.

All derive from `LowshardError` and, beside it, from the builtin that fits, so that callers may catch
either. `exit_code` is what the command line returns for the class.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

_MOST_CHARACTERS = 16_000


class LowshardError(Exception):
    """Base of every error that lowshard raises on purpose. A text too long to read is cut to its two ends."""

    exit_code = 2

    def __str__(self) -> str:
        text = super().__str__()
        if len(text) <= _MOST_CHARACTERS:
            return text
        half = _MOST_CHARACTERS // 2
        return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"


def again(error: LowshardError, text: str | None = None) -> LowshardError:
    """Return an error like another, to be raised once more: its class, its attributes, and its words or these."""
    made = type(error)(str(error) if text is None else text)
    made.__dict__.update(error.__dict__)
    return made


def cause_of(error: BaseException | None) -> BaseException | None:
    """Return what an error that tells another one's words to all ranks is raised from.

    The other one, where it came through code of the user's, whose lines are then shown; where lowshard itself raised
    it, nobody reads the same words twice, and it is what that one was raised from.
    """
    if not isinstance(error, LowshardError):
        return error
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] != __package__:
            return error
        trace = trace.tb_next
    return error.__cause__


class ShardingError(LowshardError, ValueError):
    """An invalid placement, mesh, layout or plan."""


class ShardIndexError(ShardingError, IndexError):
    """An axis that a weight does not have, or the number of a device beyond the devices of a strategy."""


class MarkerError(LowshardError, NotImplementedError):
    """A strategy that marks a whole module was applied to one weight."""


class MeshError(ShardingError):
    """An invalid device mesh, or one that does not fit the world."""


class LayoutError(ShardingError):
    """An invalid layout, or the layout of another array."""


class PlanError(ShardingError):
    """No plan leads from the source to the destination, or a plan was used for something else."""


class RulesError(ShardingError):
    """An invalid mesh-and-rule file, or an invalid use of one.

    The text starts with the place in the file; the same facts stand in `path`, `line` and `column`
    (both counted from 1), `rule` (as the file has it) and `axis`, each None where it does not apply.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        line: int | None = None,
        column: int | None = None,
        rule: str | None = None,
        axis: str | None = None,
    ) -> None:
        super().__init__(message)
        self.path = path
        self.line = line
        self.column = column
        self.rule = rule
        self.axis = axis


class DTypeError(LowshardError, TypeError):
    """A dtype that lowshard does not know or that the operation does not take."""


class BufferMismatchError(LowshardError, ValueError):
    """A buffer whose shape, dtype, device or memory order is not the one that was asked for."""


class KernelError(LowshardError, ValueError):
    """Arguments that a kernel does not take (a last dim that is not a multiple of 32, say)."""


class CommError(LowshardError, RuntimeError):
    """A communicator used in a way it does not allow (closed, wrong peer, wrong root).

    `ranks` holds the ranks of the job (of COMM_WORLD) that a PeerFailed or a TimedOut is about, where they are known:
    those that failed, have left, or did not come.
    """

    exit_code = 1
    ranks: tuple[int, ...] = ()

    def about(self, ranks: Iterable[int]) -> Self:
        """Note the ranks of the job that this error is about; returns itself."""
        self.ranks = tuple(int(rank) for rank in ranks)
        return self


class CaptureError(CommError):
    """A call that a CUDA graph cannot record, made while its stream is being captured."""


class StreamError(LowshardError, ValueError):
    """A stream that CuPy cannot use, or one that belongs to another device than the buffers."""


class MismatchError(CommError):
    """Ranks asked for different things in one collective call."""

    exit_code = 72


class PeerFailed(CommError):
    """Another rank failed while this one waited for it."""

    exit_code = 70


class TimedOut(CommError, TimeoutError):
    """A wait passed its deadline."""

    exit_code = 71


class CheckpointError(LowshardError, ValueError):
    """A checkpoint file that is missing, damaged, or not what was asked for."""


class NotDurable(CheckpointError):
    """A new checkpoint was put in place, but the system did not confirm that it is on the disk."""


class DependencyError(LowshardError, ImportError):
    """An optional library is missing; the text names the extra that installs it."""


class ProfileError(LowshardError, ValueError):
    """A cluster profile that is damaged, or that says nothing about what it was asked."""


class LaunchError(LowshardError, RuntimeError):
    """Ranks cannot be started as asked."""


class VerificationError(LowshardError, AssertionError):
    """A result that was checked is wrong."""

    exit_code = 1


class InternalError(LowshardError, RuntimeError):
    """What the library did contradicts itself, or broke: a defect of the library, to be reported."""

    exit_code = 1


class SolverError(ShardingError, RuntimeError):
    """A solver found no action: nothing feasible, over the budget, or against its policy."""

    exit_code = 1


class BudgetError(SolverError):
    """No action fits into the memory budget of a device."""


class PolicyError(SolverError):
    """Actions exist, but the solver is told not to take any of them."""


class BadGrid(MeshError):
    """A world that cannot be cut into the shard and replica groups that were asked for."""


class BadGrad(LowshardError, ValueError):
    """A gradient whose shape or dtype is not its parameter's."""


class StepError(LowshardError, RuntimeError):
    """A call of a sharded model in a state that does not allow it."""

    exit_code = 1


class StaleParams(StepError):
    """Whole parameters that are older than the last update, or a second update with the same gradients."""


class NotOpen(StepError):
    """A unit whose parameters are not open."""


class NotJoined(StepError):
    """Gradients that are still local, or still being reduced."""


class OpenLimit(StepError):
    """More units open, or with gradients not reduced, than the pool was made for."""


__all__ = sorted(
    name for name, kind in globals().items() if isinstance(kind, type) and issubclass(kind, LowshardError)
)


def __dir__() -> list[str]:
    return sorted(__all__)
