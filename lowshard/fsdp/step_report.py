"""Statistics of a sharded model: bytes, waits, events, memory."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from lowshard.comm.work import Work
from lowshard.fsdp.unit_layout import PoolPlan

_EVENTS_KEPT = 4096


@dataclass(frozen=True)
class Event:
    """The beginning or end of an operation.

    Attributes:
        time_s: of `time.perf_counter`.
        what: "gather start", "gather end", "open", "close", "reduce start", "reduce end".
        unit: which unit.
    """

    time_s: float
    what: str
    unit: str


@dataclass(frozen=True)
class Report:
    """What this rank has done since the model was made.

    Attributes:
        wire_bytes: bytes of elements that this rank sent, by purpose: "gather", "reduce" (within the shard group),
            "replica" (across). Checks and norms count as "control", files as "state".
        gathers: how many gathers were made, by unit.
        unused_gathers: of units that were gathered ahead and not opened.
        zero_reduces: units that were reduced without a gradient, by how often.
        wait_s: seconds that calls waited for data, by unit.
        copied_bytes: written by copies and casts on this rank, beside communication.
        pool: the parts of the pool.
        accumulator_bytes: of partial sums of micro-batches, which exist once they were needed.
        state_bytes: of the optimizer's state.
        full_shard_bits: whether parameters and state have the bits that FullShard gives with the same settings on as
            many ranks: with order="tree" and accumulate="local" every strategy, HybridShard as `ShardingStrategy` says.
        events: the last few thousand, in order of time.
    """

    wire_bytes: Mapping[str, int]
    gathers: Mapping[str, int]
    unused_gathers: int
    zero_reduces: Mapping[str, int]
    wait_s: Mapping[str, float]
    copied_bytes: int
    pool: PoolPlan
    accumulator_bytes: int
    state_bytes: int
    full_shard_bits: bool
    events: tuple[Event, ...]

    @property
    def total_wire_bytes(self) -> int:
        """Bytes of parameters and gradients that this rank sent."""
        return sum(self.wire_bytes.get(name, 0) for name in ("gather", "reduce", "replica"))

    @property
    def peak_bytes(self) -> int:
        """Bytes of all memory that the model holds: it does not grow after its first step."""
        return self.pool.total_bytes + self.accumulator_bytes + self.state_bytes


@dataclass
class Log:
    """Collects the statistics."""

    gathers: Counter[str] = field(default_factory=Counter)
    unused_gathers: int = 0
    zero_reduces: Counter[str] = field(default_factory=Counter)
    wait_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    copied_bytes: int = 0
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=_EVENTS_KEPT))

    def note(self, what: str, unit: str) -> None:
        """Note an event."""
        self.events.append(Event(time.perf_counter(), what, unit))

    def wait(self, work: Work, unit: str) -> None:
        """Wait for work of a unit, and add up the time."""
        begin_s = time.perf_counter()
        work.wait()
        self.wait_s[unit] += time.perf_counter() - begin_s
