"""What a rank takes out of its neighbours' sources itself: out of memory that it maps, or may read by a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from lowshard.box import shape_of
from lowshard.errors import CommError
from lowshard.kernels.buffer import address
from lowshard.reshard.buckets import Copier, Span, packed_span, span_of
from lowshard.reshard.huge_pages import settle
from lowshard.reshard.node_view import NodeView
from lowshard.reshard.rank_side import Side
from lowshard.reshard.reshard_plan import Move

if TYPE_CHECKING:
    from lowshard.reshard.peer_read import Crossing

Array = Any


class Sight(Side):
    """The moves that this rank reads where they lie; their owners do nothing for them."""

    _anchor: Array
    _is_direct = False
    """Whether any rank reads others' sources: all ranks then wait until these are as they shall be."""
    _unsettled: list[Array]
    """This rank's sources in private memory, until they have been put into huge pages."""
    _seen: dict[int, dict[int, Array]]
    _crossings: dict[int, Crossing]

    def _look(self, view: NodeView) -> tuple[dict[int, list[Move]], dict[int, list[Move]]]:
        """Find what is read where it lies; return what is packed by its owner instead: to send, and to receive.

        Collective: all ranks of the communicator call this.
        """
        shown = self._shown_sources()
        seen = self._by_entry(view.publish([array for _, array in shown]))
        private = self._by_entry(view.lay_open([array for _, array in shown])) if view.reads_across else {}
        mapped: list[tuple[Move, Span]] = []
        across: dict[int, list[tuple[Move, Span]]] = {}
        left: dict[int, list[Move]] = {}
        for peer, found in self._mine.receives.items():
            readable = self._readable(view, peer, found, private.get(peer, {}))
            for m in found:
                array, at = seen.get(peer, {}).get(m.entry), private.get(peer, {}).get(m.entry, 0)
                if self._is_prepared(m) or self._handed(m):
                    left.setdefault(peer, []).append(m)
                elif array is not None:
                    mapped.append((m, self._source_span(m, address(array))))
                elif at and readable.get(m.entry, False) and self._is_worth_it(m, at):
                    across.setdefault(peer, []).append((m, self._source_span(m, at)))
                else:
                    left.setdefault(peer, []).append(m)
        self._is_direct = True
        own = private.get(self.comm.rank, {})
        self._unsettled = [
            self._src[n] for n, at in own.items() if at and seen[self.comm.rank].get(n) is None
        ]
        self._seen = seen  # keeps the mappings
        self._direct = Copier([span for _, span in mapped], self._targets(mapped), self._anchor)
        self._crossings = {}
        if across:
            from lowshard.reshard.peer_read import Crossing

            for peer, pairs in across.items():
                spans = [span for _, span in pairs]
                self._crossings[peer] = Crossing(view.pid(peer), spans, self._targets(pairs))
        return self._ask_which(left), left

    def _forget_sources(self) -> None:
        self._is_direct = False
        self._unsettled = []
        self._seen = {}
        self._crossings = {}

    def _settle_sources(self) -> None:
        """Put what others read into huge pages: what is moved more than once gains by it."""
        settle(self._unsettled)
        self._unsettled = []

    def _read(self) -> None:
        """Read everything that was found, and note where memory could not be read."""
        self._direct.run()
        me = self.comm.rank
        for _, peer in sorted(((peer - me) % self.comm.size, peer) for peer in self._crossings):
            if not self._crossings[peer].run() and self._error is None:
                self._error = CommError(
                    f"the memory of rank {peer} could not be read; set LOWSHARD_CROSS_MEMORY=off to go without if it "
                    "lives and may not be read"
                )

    def _shown_sources(self) -> list[tuple[int, Array | None]]:
        """Return this rank's source arrays by tensor, None for those that are not read where they lie."""
        comm, found = self.comm, []
        for n, e in enumerate(self.plan.entries):
            if comm.rank not in e.src:
                continue
            array = self._src.get(n)
            shown = (
                array is not None
                and n not in self._quantised
                and array.flags.c_contiguous
                and not self._transforms(e.src_local_name(comm.rank))
            )
            found.append((n, array if shown else None))
        return found

    def _by_entry(self, rows: Sequence[Sequence[Any]]) -> dict[int, dict[int, Any]]:
        """Return what ranks gave for their source tensors by rank and tensor."""
        return {
            rank: dict(zip((n for n, e in enumerate(self.plan.entries) if rank in e.src), row, strict=True))
            for rank, row in enumerate(rows)
        }

    def _source_span(self, move: Move, at: int) -> Span:
        """Return where a move's box lies in a source array that begins at an address, row-major."""
        entry = self.plan.entries[move.entry]
        shape = entry.src.local_shape(move.src_rank)
        assert shape is not None
        whole = packed_span(at, shape, entry.src.itemsize_bytes)
        begin = at + sum(s * b[0] for s, b in zip(whole.strides, move.src_box, strict=True))
        return Span(begin, whole.strides, shape_of(move.src_box), whole.itemsize)

    def _targets(self, pairs: Sequence[tuple[Move, Span]]) -> list[Span]:
        return [span_of(self._dst[m.entry], m.dst_box) for m, _ in pairs]

    def _readable(
        self, view: NodeView, peer: int, moves: Sequence[Move], private: Mapping[int, int]
    ) -> dict[int, bool]:
        """Return, by tensor, whether this process may read a peer's private sources of some moves."""
        sizes: dict[int, int] = {}
        for m in moves:
            if m.entry not in sizes and private.get(m.entry, 0):
                layout = self.plan.entries[m.entry].src
                sizes[m.entry] = layout.itemsize_bytes * prod(layout.local_shape(peer) or ())
        if not sizes:
            return {}
        from lowshard.reshard.peer_read import can_read

        stretches = [(private[n], size) for n, size in sizes.items()]
        return dict(zip(sizes, can_read(view.pid(peer), stretches), strict=True))

    def _is_worth_it(self, move: Move, at: int) -> bool:
        from lowshard.reshard.peer_read import is_worth_it

        return is_worth_it(self._source_span(move, at), span_of(self._dst[move.entry], move.dst_box))

    def _ask_which(self, streams_in: Mapping[int, Sequence[Move]]) -> dict[int, list[Move]]:
        """Learn which of this rank's moves the receivers do not read for themselves."""
        comm = self.comm
        counts_out = [len(self._mine.sends.get(p, ())) for p in range(comm.size)]
        counts_in = [len(self._mine.receives.get(p, ())) for p in range(comm.size)]
        wanted = np.zeros(sum(counts_in), np.uint8)
        displs_in = _displs(counts_in)
        for peer, found in self._mine.receives.items():
            streamed = {m.id for m in streams_in.get(peer, ())}
            for i, m in enumerate(found):
                wanted[displs_in[peer] + i] = m.id in streamed
        asked = np.zeros(sum(counts_out), np.uint8)
        displs_out = _displs(counts_out)
        comm._all_to_all_v(wanted, counts_in, displs_in, asked, counts_out, displs_out)
        found_out: dict[int, list[Move]] = {}
        for peer, moves in self._mine.sends.items():
            mine = [m for i, m in enumerate(moves) if asked[displs_out[peer] + i]]
            if mine:
                found_out[peer] = mine
        return found_out


def _displs(counts: Sequence[int]) -> list[int]:
    return [sum(counts[:i]) for i in range(len(counts))]
