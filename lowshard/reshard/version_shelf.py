"""What a rank of a subscriber serves, open to other subscribers of its host: they need not ask the publisher for it.

The two sets of arrays take turns, as snapshots of a publisher do. The number of a set is 0 while it is written to, so
that who reads it meanwhile finds out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from lowshard.box import Box
from lowshard.reshard.publication_address import tcp_door
from lowshard.reshard.tensor_layout import TensorLayout
from lowshard.reshard.version_server import VersionServer
from lowshard.reshard.version_store import Place, box_of, places_of, runs_of

_HERE = ("127.0.0.1",)


class Held:
    """One of the two sets.

    Attributes:
        number: of the snapshot that is whole in it, or 0.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._arrays = arrays
        self.number = 0

    def runs(self, place: Place, box: Box, crc: int) -> Iterator[tuple[memoryview, int]]:
        """Yield the bytes of a box of a tensor as `Memory.runs` does."""
        yield from runs_of(box_of(self._arrays[place.name], box), crc)


class Shelf:
    """Both sets of a rank, and the door to them, which is open to this host and to who knows the token.

    Attributes:
        mark: of the publisher whose versions they hold.
        addresses: of the door.
    """

    def __init__(
        self,
        layouts: Mapping[str, TensorLayout],
        rank: int,
        sets: Sequence[Mapping[str, np.ndarray]],
        mark: str,
        token: bytes,
    ) -> None:
        """Open the door; nothing is there yet.

        Args:
            layouts: of all tensors.
            rank: this rank.
            sets: its arrays.
            mark: of the publisher whose versions they hold.
            token: of the door.

        Raises:
            OSError: this host has no port for it.
        """
        self.mark = mark
        self.places, _ = places_of(layouts, rank)
        self._held = tuple(Held(arrays) for arrays in sets)
        door = tcp_door(_HERE, 0, token)
        self.addresses = door.addresses
        self._server = VersionServer([door], self, mark)

    def find(self, number: int) -> Held | None:
        """Return a set by the number of the snapshot that it holds, where one does."""
        return next((one for one in self._held if number and one.number == number), None)

    def put(self, at: int, number: int) -> None:
        """Say which snapshot one of the sets holds; 0 before it is written to."""
        self._held[at].number = number

    def close(self) -> None:
        """Close the door and end what comes through it."""
        self._server.close()
