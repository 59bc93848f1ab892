"""Sums of a sequence of terms in a balanced binary tree: tree order over micro-batches."""

from __future__ import annotations

from typing import Any

Array = Any  # a NumPy or CuPy array; CuPy ships no types


class TreeSum:
    """A binary counter of partial sums: digit i holds the sum of 2^i terms, added as a tree."""

    def __init__(self, elems: int, dtype: Any, xp: Any) -> None:
        self._elems, self._dtype, self._xp = elems, dtype, xp
        # For 2^k terms the result is that of order="tree", from whichever ranks they come.
        self._digits: list[Array | None] = []
        self.terms = 0

    @property
    def bytes(self) -> int:
        """Bytes of the partial sums, which stay for reuse."""
        return sum(digit.nbytes for digit in self._digits if digit is not None)

    def add(self, term: Array | None) -> None:
        """Add a term `[elems]`, which is left as it is; None adds zeros."""
        level = 0
        carry: Array | None = None
        while self.terms >> level & 1:
            digit = self._digits[level]
            assert digit is not None
            value = term if level == 0 else carry
            if value is None:
                self._xp.add(digit, digit.dtype.type(0), out=digit)
            else:
                self._xp.add(digit, value, out=digit)
            carry, level = digit, level + 1
        self.terms += 1
        if level == len(self._digits):
            self._digits.append(None)
        if carry is None:
            if self._digits[0] is None:
                self._digits[0] = self._xp.empty(self._elems, self._dtype)
            digit = self._digits[0]
            assert digit is not None
            digit[...] = 0 if term is None else term
            return
        # The sum moves up; the array that was there is the lower digit's next.
        self._digits[level - 1], self._digits[level] = self._digits[level], carry
        if self._digits[level - 1] is None:
            self._digits[level - 1] = self._xp.empty(self._elems, self._dtype)

    def finish(self, term: Array) -> None:
        """Add the last term and write the whole sum in its place; the sum is empty then."""
        for level in range(len(self._digits)):
            if self.terms >> level & 1:
                self._xp.add(self._digits[level], term, out=term)
        self.terms = 0

    def clear(self) -> None:
        """Drop all terms."""
        self.terms = 0
