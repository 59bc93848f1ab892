"""Ranks on several nodes as one communicator: shared memory inside the nodes, messages between them.

Large payloads go by way of windows: memory that all ranks of a node see. Every rank exchanges its own part with the
other nodes, one copy a node, while the others of its node do the same with theirs. Small payloads, and what each
rank has for each other, are left to MPI among all ranks.

How ranks are numbered and how many share a node does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lowshard.comm.call import Call
from lowshard.comm.default_collectives import Run
from lowshard.comm.mpi import EXCHANGE_TAG, MPICommunicator, run_batch, start_message
from lowshard.comm.node.call_runner import Place
from lowshard.comm.node.communicator import NodeCommunicator, lend_group
from lowshard.comm.node.node_memory import NodeMemory
from lowshard.comm.node.node_reach import HostReach
from lowshard.comm.node_collectives import Windows
from lowshard.comm.node_map import Seating
from lowshard.comm.protocol import Communicator
from lowshard.comm.wait_guard import Lookout
from lowshard.comm.work import Work
from lowshard.errors import TimedOut

Array = Any


class HierarchicalCommunicator(Windows):
    """Ranks on several nodes.

    Attributes:
        flat: MPI among all ranks.
        node: the ranks of this node, who share memory.
        seating: which ranks share a node.
    """

    def __init__(self, flat: MPICommunicator, seating: Seating, memory: NodeMemory, block: int) -> None:
        """Make one out of its parts, which it closes.

        Args:
            flat: among all ranks.
            seating: of its ranks.
            memory: of the processes of this node.
            block: address of a block that `lend_group` has lent to this node's ranks.
        """
        super().__init__(
            flat.rank, flat.size, group=flat._group_name, timeout_s=flat.timeout_s, activity=flat._activity
        )
        self.flat, self.seating = flat, seating
        self._mailbox, self._memory = flat._mailbox, memory
        self._mailbox.reserve(EXCHANGE_TAG + 1)
        self._home = seating.home(self.rank)
        local = seating.nodes[self._home]
        place = local.index(self.rank)
        mailbox = self._mailbox.part(local, place, 0)
        mailbox.lookout = _NodeLookout(mailbox.lookout, local)
        self.node = NodeCommunicator(
            Place(memory, tuple(seating.seats[r][1] for r in local), block), place, mailbox,
            group=f"{flat._group_name}/node", timeout_s=self.timeout_s, activity=self._activity,
        )  # fmt: skip
        self.node._check = "off"  # calls are compared among all ranks before any part begins
        others = [node for node in range(len(seating.nodes)) if node != self._home]
        self._contacts = [seating.contact(self.rank, node) for node in others]
        self._serves = [
            r for node in others for r in seating.nodes[node] if seating.contact(r, self._home) == self.rank
        ]
        self._lends = False

    @property
    def transport(self) -> str:
        """The transport's name."""
        return "mpi"

    @property
    def node_size(self) -> int | None:
        """Ranks a node, where all have as many and they are numbered node by node."""
        nodes = self.seating.nodes
        size = len(nodes[0])
        in_order = all(list(ranks) == list(range(i * size, (i + 1) * size)) for i, ranks in enumerate(nodes))
        return size if in_order else None

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> Array:
        """Return an array, not filled, in memory that the other ranks of the node read where it lies."""
        return self.node.empty(shape, dtype)

    def _new_reach(self) -> HostReach:
        homes = [self.seating.home(rank) for rank in range(self.size)]
        return HostReach(self.node.reach, homes, self._home)

    def fold(self, terms: Sequence[Array], out: Array, op: str, divisor: int = 1) -> None:
        """Write the reduction of arrays of any strides into `out`, in tree order; a step of this rank alone."""
        self.node.fold(terms, out, op, divisor)

    # ---- primitives

    def _compare(self, signature: int) -> bool:
        return self.flat._compare(signature)

    def _gather_facts(self, record: np.ndarray) -> np.ndarray:
        return self.flat._gather_facts(record)

    def _all_to_all_v(
        self, send: Array, send_counts: Sequence[int], send_displs: Sequence[int], recv: Array,
        recv_counts: Sequence[int], recv_displs: Sequence[int],
    ) -> None:  # fmt: skip
        self.flat._all_to_all_v(send, send_counts, send_displs, recv, recv_counts, recv_displs)

    def _gather(self, send: Array, recv: Array | None, root: int) -> None:
        self.flat._gather(send, recv, root)

    def _scatter(self, send: Array | None, recv: Array, root: int) -> None:
        self.flat._scatter(send, recv, root)

    def _barrier(self) -> None:
        self.flat._barrier()

    def _plan_barrier(self, call: Call) -> Run:
        if self._check == "off":
            return self.flat._barrier
        return lambda: self._verify(call)  # which nobody is through with before all have come

    def _native_all_reduce(self, send: Array, recv: Array, op: str) -> bool:
        return self.flat._native_all_reduce(send, recv, op)

    def _native_reduce_scatter(self, send: Array, recv: Array, op: str) -> bool:
        return self.flat._native_reduce_scatter(send, recv, op)

    # ---- messages

    def _send(self, buf: Array, dst: int) -> None:
        self._mailbox.send(buf, dst)

    def _recv(self, buf: Array, src: int) -> None:
        self._mailbox.recv(buf, src)

    def _start_message(self, name: str, buf: Array, peer: int) -> Work:
        return start_message(self, self._mailbox, name, buf, peer)

    def _run_batch(self, batch: Sequence[tuple[Call, Array, int]]) -> None:
        run_batch(self._mailbox, batch)

    # ---- groups and life

    def _split(self, color: int | None, key: int) -> Communicator | None:
        asked = self._gather_facts(
            np.array([-1 if color is None else color, key, self._mailbox.next_tag], np.int64)
        )
        tag = int(asked[:, 2].max())
        self._mailbox.reserve(tag + 1)
        groups = {c: _members(asked, c) for c in {int(row[0]) for row in asked} - {-1}}
        seatings = {c: self.seating.part(ranks) for c, ranks in groups.items()}
        # The first of a group's ranks on a node lends what they meet in.
        ranks = groups.get(-1 if color is None else color, [])
        local = [r for r in ranks if self.seating.home(r) == self._home]
        facts = np.zeros(2, np.int64)
        if local[:1] == [self.rank]:
            block = lend_group(self._memory, len(local))
            facts[:] = block.segment, block.offset
        places = self._gather_facts(facts)
        spans = {c for c, seating in seatings.items() if len(seating.nodes) > 1}
        comm = None
        if spans:
            # MPI has no split that can be given up. All ranks are here, since they were compared a moment ago.
            mpi = self.flat._mpi
            comm = self.flat._comm.Split(
                color if color in spans else mpi.UNDEFINED, ranks.index(self.rank) if ranks else 0
            )
        self._lends = self._lends or bool(groups)
        if color is None:
            return None
        name, rank = f"{self._group_name}/{tag}.{color}", ranks.index(self.rank)
        # Messages of all groups go over the communicator that the side channel watches.
        mailbox = self._mailbox.part(ranks, rank, tag)
        at = self._memory.address(self.seating.seats[local[0]][1], *(int(word) for word in places[local[0]]))
        if color not in spans:
            members = tuple(self.seating.seats[r][1] for r in ranks)
            return NodeCommunicator(
                Place(self._memory, members, at), rank, mailbox, group=name, timeout_s=self.timeout_s,
                activity=self._activity,
            )  # fmt: skip
        flat = MPICommunicator(
            comm, owned=True, lookout=self.flat._lookout, group=name, timeout_s=self.timeout_s,
            activity=self._activity, mailbox=mailbox,
        )  # fmt: skip
        if seatings[color].shares:
            return HierarchicalCommunicator(flat, seatings[color], self._memory, at)
        return flat

    def _close(self) -> None:
        self._failed = self._failed or self.node._failed
        self.node.close()
        if self._lends and self._mailbox._comm is self.flat._comm:
            return  # messages of its groups go over it
        self.flat._failed = self.flat._failed or self._failed
        self.flat.close()


class _NodeLookout(Lookout):
    """What waits inside a node look at: ranks are named as all others know them."""

    def __init__(self, whole: Lookout, ranks: Sequence[int]) -> None:
        super().__init__(whole.watch, whole.activity)
        self._whole, self._ranks = whole, ranks
        self.flag_address, self._flag = whole.flag_address, whole._flag

    def late(
        self, what: str, missing: Sequence[int], timeout_s: float, watched: Sequence[int] = ()
    ) -> TimedOut:
        """Return the error for a wait whose time is over; see `Lookout.late`."""
        return super().late(what, [self._ranks[r] for r in missing], timeout_s, watched)


def _members(asked: np.ndarray, color: int) -> list[int]:
    """Return the ranks that asked for a colour, by key, then rank."""
    return [rank for _, rank in sorted((int(row[1]), r) for r, row in enumerate(asked) if row[0] == color)]
