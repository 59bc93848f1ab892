"""CRC-32 of stored arrays, taken from what is read while it is read, and joined from pieces of one array.

The sum is zlib's. ISA-L's routine gives the same number some ten times faster (a tenth of the time of a copy from
memory, as long as the bytes are in a cache); zlib's own stands in where the isal package is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

from lowshard.bounded import bounded_cache

_POLYNOMIAL = 0xEDB88320
"""IEEE 802.3's, with the coefficient of x^0 in the highest bit."""
_ONE = 1 << 31

Piece = tuple[int, int, int]
"""First byte in the file, the byte behind the last, and the CRC-32 of the bytes between them."""
Key = tuple[str, int]
"""File and first byte of a stored array."""


def crc32(data: memoryview | bytes, value: int = 0) -> int:
    """Return the CRC-32 of bytes; `value` is that of the bytes before them."""
    return _routine()(data, value)


@cache
def _routine() -> Callable[..., int]:
    try:
        from isal.isal_zlib import crc32 as routine
    except ImportError:
        from zlib import crc32 as routine
    return routine


def joined(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC-32 of two runs of bytes, one behind the other, from the sum of each.

    A sum is a remainder modulo the polynomial; what follows multiplies it by x^(8 second_bytes), and the sums of both
    add up (M. Adler's crc32_combine in zlib rests on the same).
    """
    return _product(first, _shift(second_bytes)) ^ second


@bounded_cache(1 << 18)  # layers repeat
def _shift(size_bytes: int) -> int:
    """Return x^(8 size_bytes) modulo the polynomial."""
    shift, bits, k = _ONE, 8 * size_bytes, 0
    while bits:
        if bits & 1:
            shift = _product(shift, _power(k))
        bits >>= 1
        k += 1
    return shift


@cache
def _power(k: int) -> int:
    """Return x^(2^k) modulo the polynomial."""
    return _ONE >> 1 if k == 0 else _product(_power(k - 1), _power(k - 1))


def _product(a: int, b: int) -> int:
    total, term = 0, _ONE
    while term:
        if a & term:
            total ^= b
        term >>= 1
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return total


class Tally:
    """The sums of what one rank has read of stored arrays."""

    def __init__(self) -> None:
        self._pieces: dict[Key, list[Piece]] = {}

    def add(self, key: Key, at: int, data: memoryview) -> None:
        """Add bytes of a stored array, which lie at `at` in its file."""
        pieces = self._pieces.setdefault(key, [])
        if pieces and pieces[-1][1] == at:  # goes on where the last one ended
            start, _, value = pieces[-1]
            pieces[-1] = start, at + len(data), crc32(data, value)
        else:
            pieces.append((at, at + len(data), crc32(data)))

    def pieces(self, key: Key) -> list[Piece]:
        """Return what was read of a stored array."""
        return self._pieces.get(key, [])


def chain(start: int, stop: int, pieces: Iterable[Piece]) -> list[Piece] | None:
    """Return those pieces that, one behind the other, make up bytes start to stop; None where they do not."""
    by_start: dict[int, Piece] = {}
    for piece in pieces:
        if piece[1] > by_start.get(piece[0], piece)[1] or piece[0] not in by_start:
            by_start[piece[0]] = piece
    found, at = [], start
    while at < stop:
        if at not in by_start:
            return None
        found.append(by_start[at])
        at = by_start[at][1]
    return found if at == stop else None


def sum_of(pieces: Iterable[Piece]) -> int:
    """Return the CRC-32 of pieces one behind the other."""
    value = 0
    for i, (first, end, own) in enumerate(pieces):
        value = joined(value, own, end - first) if i else own
    return value
