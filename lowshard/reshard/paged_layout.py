"""How a key-value cache lies in pages on the ranks of one server: a frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lowshard import dtypes
from lowshard.argument import brief, instance, whole, wholes
from lowshard.box import Interval, split_interval
from lowshard.errors import DTypeError, LayoutError
from lowshard.reading import reader

DIMS = "lkpthd"
"""Letters of the dims, in the order in which elements are counted for a digest and travel; p and t are one there."""
_NEEDED = "pthd"
_MOST = (1 << 31) - 1


@dataclass(frozen=True)
class PagedLayout:
    """A paged key-value cache over tensor-parallel ranks: each holds a pool of pages with its part of the heads.

    A rank's array has a dim for each letter of `dims`, in that order: p pages, t tokens of a page, h heads, d the
    elements of a head, and where they are in it l layers and k keys and values (2). So "pthd" is one of keys or of
    values alone, "kpthd" and "pkthd" both of a layer, "phtd" with heads before tokens, "lkpthd" all layers.

    Heads are dealt to the ranks in balanced parts; with more ranks than heads, neighbours hold the same head.

    Args:
        pages: in each rank's pool.
        page_tokens: tokens of a page.
        heads: key-value heads of the model.
        head_dim: elements of a head.
        dtype: of the cache.
        dims: the order of the dims.
        layers: extent of the dim l.
        ranks: of the communicator that pages are moved over, in tensor-parallel order.

    Raises:
        LayoutError: a size below 1, dims that are not those letters, a rank twice, or ranks that are neither a
            multiple of the heads nor at most as many.
        DTypeError: unknown dtype.
    """

    pages: int
    page_tokens: int
    heads: int
    head_dim: int
    dtype: str = "bfloat16"
    dims: str = _NEEDED
    layers: int = 1
    ranks: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        for name in ("pages", "page_tokens", "heads", "head_dim", "layers"):
            rule = f"{name} of a paged layout is a number of 1 or more"
            object.__setattr__(self, name, whole(getattr(self, name), rule, LayoutError, 1, _MOST))
        instance(self.dims, str, "dims of a paged layout are letters, such as pthd", LayoutError)
        try:
            object.__setattr__(self, "dtype", dtypes.get(self.dtype).name)
        except DTypeError as error:
            raise DTypeError(f"dtype of a paged layout: {error}") from error
        if (
            len(set(self.dims)) != len(self.dims)
            or not set(_NEEDED) <= set(self.dims) <= set(DIMS)
            or (self.layers > 1 and "l" not in self.dims)
        ):
            raise LayoutError(
                f"dims of a paged layout are p, t, h and d, each once, in any order, with l where there are layers and "
                f"k where keys and values share the array, got {brief(self.dims)} for {self.layers} layers"
            )
        rule = "ranks of a paged layout are those of the communicator, each once, in tensor-parallel order"
        object.__setattr__(self, "ranks", wholes(self.ranks, rule, LayoutError, 0, _MOST))
        if not self.ranks or len(set(self.ranks)) != len(self.ranks):
            raise LayoutError(f"{rule}, got {brief(self.ranks)}")
        if len(self.ranks) > self.heads and len(self.ranks) % self.heads:
            raise LayoutError(
                f"with more ranks than heads each head has as many ranks, got {len(self.ranks)} ranks and {self.heads} "
                "heads"
            )

    @property
    def parts(self) -> int:
        """Parts that the heads are dealt into."""
        return min(len(self.ranks), self.heads)

    @property
    def itemsize_bytes(self) -> int:
        """Bytes of an element."""
        return dtypes.get(self.dtype).itemsize_bytes

    @property
    def unit(self) -> str:
        """NumPy's name of unsigned integers as wide as an element."""
        return f"u{self.itemsize_bytes}"

    @property
    def kinds(self) -> int:
        """2 where keys and values share an array, else 1."""
        return 2 if "k" in self.dims else 1

    @property
    def token_elems(self) -> int:
        """Elements of one token of one head, over all layers, keys and values."""
        return self.layers * self.kinds * self.head_dim

    def heads_of(self, rank: int) -> Interval:
        """Return which heads a rank holds.

        Raises:
            LayoutError: it is not one of the ranks.
        """
        return split_interval((0, self.heads), self.parts, self.part_of(rank))

    def part_of(self, rank: int) -> int:
        """Return which part of the heads a rank holds, counted from 0; errors as `heads_of`."""
        rule = f"the ranks of this layout are {brief(self.ranks)}"
        rank = whole(rank, rule, LayoutError)
        if rank not in self.ranks:
            raise LayoutError(f"{rule}, got {brief(rank)}")
        return self.ranks.index(rank) // (len(self.ranks) // self.parts)

    def holders(self, part: int) -> tuple[int, ...]:
        """Return the ranks that hold a part of the heads.

        Raises:
            LayoutError: it is not one of the parts.
        """
        rule = f"a part of this layout is 0 to {self.parts - 1}"
        part = whole(part, rule, LayoutError, 0, self.parts - 1)
        copies = len(self.ranks) // self.parts
        return tuple(rank for rank in self.ranks if self.part_of(rank) == part)[:copies]

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's array; errors as `heads_of`."""
        start, stop = self.heads_of(rank)
        extents = {
            "l": self.layers, "k": 2, "p": self.pages, "t": self.page_tokens, "h": stop - start, "d": self.head_dim,
        }  # fmt: skip
        return tuple(extents[letter] for letter in self.dims)

    def __str__(self) -> str:
        return (
            f"{dtypes.get(self.dtype).short} {self.dims}: {self.pages} pages of {self.page_tokens} tokens, "
            f"{self.heads} heads of {self.head_dim} over {len(self.ranks)} ranks"
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "pages": self.pages, "page_tokens": self.page_tokens, "heads": self.heads, "head_dim": self.head_dim,
            "dtype": self.dtype, "dims": self.dims, "layers": self.layers, "ranks": list(self.ranks),
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: object) -> PagedLayout:
        """Return the value that `to_json` wrote.

        Raises:
            LayoutError, DTypeError: it is not a valid layout.
        """
        return _read(data)


@reader("paged layout", LayoutError)
def _read(
    pages: int,
    page_tokens: int,
    heads: int,
    head_dim: int,
    dtype: str,
    dims: str,
    layers: int,
    ranks: tuple[int, ...],
) -> PagedLayout:
    return PagedLayout(pages, page_tokens, heads, head_dim, dtype, dims, layers, ranks)
