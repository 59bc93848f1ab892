"""How long a reshard will take on a cluster, and what each link will carry, from the plan and a cluster profile alone.

A rank's copies and what it reads of its node go at the speed of an exchange in which all ranks of the node take part,
and what is packed for a neighbour is copied twice; what crosses the network goes at that of the network, out and in at
once, and each peer costs a message. The slowest rank decides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from lowshard.argument import instance, truth, whole
from lowshard.cost import ClusterProfile, Level
from lowshard.errors import PlanError, ProfileError
from lowshard.mesh import MOST_RANKS

_SMALL_BYTES, _LARGE_BYTES = 1 << 10, 1 << 25


@runtime_checkable
class Traffic(Protocol):
    """What is asked of a plan, a `ReshardPlan`, to simulate it."""

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that hold something."""

    @property
    def world_size(self) -> int:
        """The smallest communicator that holds every rank."""

    @property
    def node_size(self) -> int | None:
        """Ranks a node, where the plan says it."""

    def incoming_bytes(self, rank: int) -> Mapping[int, int]:
        """Return the bytes that a rank gets from each rank, itself included."""


@dataclass(frozen=True)
class Load:
    """What links carry, in bytes, over the ranks (or nodes) that a plan names."""

    total_bytes: int
    max_out_bytes: int
    mean_out_bytes: float
    max_in_bytes: int
    mean_in_bytes: float
    busiest_out: int
    """The rank or node that gives most."""
    busiest_in: int


@dataclass(frozen=True)
class Simulation:
    """What was predicted.

    Attributes:
        ranks: ranks that hold something.
        seconds: until the slowest rank is done; `low` and `high` are the error bar of the profile.
        low: lower end of the bar.
        high: upper end.
        slowest_rank: the rank that decides.
        ranks_load: bytes between ranks.
        nodes_load: bytes between nodes; None where all ranks are on one.
        copied_bytes: bytes that stay on their ranks.
        max_peers: most ranks that one rank exchanges with, each way.
        is_default: the profile was not measured.
    """

    ranks: int
    seconds: float
    low: float
    high: float
    slowest_rank: int
    ranks_load: Load
    nodes_load: Load | None
    copied_bytes: int
    max_peers: int
    is_default: bool

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    def explain(self) -> str:
        """Return what was predicted as text."""
        note = " (default profile, not measured)" if self.is_default else ""
        bar = f"{_seconds(self.seconds)} ({_seconds(self.low)} to {_seconds(self.high)})"
        moved, stay = self.ranks_load.total_bytes / 1e9, self.copied_bytes / 1e9
        lines = [f"{self.ranks} ranks: {bar}{note}; rank {self.slowest_rank} is the last"]
        lines.append(
            f"moves {moved:.3f} GB between ranks, {stay:.3f} GB stay; up to {self.max_peers} peers a rank"
        )
        for what, load in (("rank", self.ranks_load), ("node", self.nodes_load)):
            if load is not None:
                lines.append(
                    f"a {what} gives {load.max_out_bytes / 1e9:.3f} GB at most ({what} {load.busiest_out}), "
                    f"{load.mean_out_bytes / 1e9:.3f} on average; takes {load.max_in_bytes / 1e9:.3f} GB at most "
                    f"({what} {load.busiest_in}), {load.mean_in_bytes / 1e9:.3f} on average"
                )
        return "\n".join(lines)


def simulate(
    plan: Traffic, profile: ClusterProfile, node_size: int | None = None, *, packed: bool = False
) -> Simulation:
    """Return the predicted time of a plan and the load of links. Pure; nothing is moved and no rank is started.

    Args:
        plan: a ReshardPlan, for any number of ranks.
        profile: from `lowshard bench profile`, or `ClusterProfile.default()`.
        node_size: ranks a node; by default the plan's, else all ranks are on one node.
        packed: whether ranks of a node pack for each other, as they do with checksums, and not read sources where
            they lie.

    Raises:
        PlanError: node_size below 1, or sources that do not cover.
        ProfileError: the profile says nothing about a level that the plan needs.
    """
    instance(plan, Traffic, "what is simulated is a ReshardPlan", PlanError)  # type: ignore[type-abstract]
    instance(profile, ClusterProfile, "a plan is simulated with a ClusterProfile", ProfileError)
    is_packed = truth(packed, "packed is True or False", PlanError)
    size = plan.node_size
    if node_size is not None:
        size = whole(node_size, "node_size is a number of ranks >= 1", PlanError, 1, MOST_RANKS)
    world = plan.world_size
    out, into, near, copied, near_out = np.zeros((5, world), np.int64)
    peers = np.zeros((2, world), np.int64)
    node_of = np.zeros(world, np.int64) if size is None else np.arange(world) // size
    far_out, far_in = np.zeros((2, world), np.int64)
    far_peers = np.zeros(world, np.int64)
    for rank in plan.ranks:
        for source, moved in plan.incoming_bytes(rank).items():
            if source == rank:
                copied[rank] += moved
                continue
            out[source] += moved
            into[rank] += moved
            peers[0, source] += 1
            peers[1, rank] += 1
            if node_of[source] == node_of[rank]:
                near[rank] += moved
                near_out[source] += moved
            else:
                far_out[source] += moved
                far_in[rank] += moved
                far_peers[[source, rank]] += 1
    busy = np.array(plan.ranks)
    on_node = max(2, int(np.bincount(node_of[busy]).max()))
    far = bool(far_in.any())
    alpha, beta, low, high = _rates(profile, "node", on_node)
    times = (near + copied + near_out * is_packed) * beta + alpha * (peers[1] - far_peers).clip(0)
    if far:
        far_alpha, far_beta, far_low, far_high = _rates(profile, "network", 2)
        times = np.maximum(times, np.maximum(far_out, far_in) * far_beta + far_alpha * far_peers)
        low, high = min(low, far_low), max(high, far_high)
    slowest = int(times.argmax())
    meeting_s = 2 * (far_alpha if far else alpha) * math.ceil(math.log2(max(2, len(busy))))
    seconds = float(times[slowest]) + meeting_s
    nodes = None
    if size is not None and node_of[-1] > 0:
        sums = [np.bincount(node_of, weights=w).astype(np.int64) for w in (far_out, far_in)]
        nodes = _load(sums[0], sums[1], np.unique(node_of[busy]))
    return Simulation(
        len(busy), seconds, seconds * low, seconds * high, slowest, _load(out, into, busy), nodes,
        int(copied.sum()), int(peers.max()), profile.is_default,
    )  # fmt: skip


def load_profile(path: str | None) -> ClusterProfile:
    """Return the profile in a file, or the default one for None."""
    return ClusterProfile.default() if path is None else ClusterProfile.load(path)


def _rates(profile: ClusterProfile, level: Level, ranks: int) -> tuple[float, float, float, float]:
    """Return seconds a message, seconds a byte that a rank reads, and how far the error bar reaches each way."""
    for op in ("all_to_all", "all_gather", "send_recv"):
        try:
            small = profile.seconds(op, ranks, _SMALL_BYTES, level)
            large = profile.seconds(op, ranks, _LARGE_BYTES, level)
        except ProfileError:
            continue
        # What a rank keeps of an exchange it copies, and a copy of its own counts below like what it reads.
        beta = max(large.seconds - small.seconds, 0.0) / _LARGE_BYTES
        steps = 1 if op == "send_recv" else max(1, ranks - 1)
        return small.seconds / steps, beta, large.low / large.seconds, large.high / large.seconds
    raise ProfileError(
        f"the profile has no all_to_all, all_gather or send_recv at the {level} level; measure one with lowshard bench "
        "profile (over two hosts for the network), or use ClusterProfile.default()"
    )


def _load(out: np.ndarray, into: np.ndarray, members: np.ndarray) -> Load:
    return Load(
        int(into.sum()), int(out.max()), float(out[members].mean()), int(into.max()), float(into[members].mean()),
        int(out.argmax()), int(into.argmax()),
    )  # fmt: skip


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"
