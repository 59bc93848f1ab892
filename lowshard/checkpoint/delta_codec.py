"""How the tensors of a delta folder are compressed, and their checksums.

zlib's format is written by ISA-L's routines where the isal package is there, by Python's own else; zstd needs the
zstandard package. Checksums are those that other writers of such folders use, of which Python has Adler-32 and CRC-32.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, cast

from lowshard.argument import one_of
from lowshard.checkpoint.crc import crc32
from lowshard.errors import CheckpointError, DependencyError, LowshardError

PIECE_BYTES = 1 << 20
COMPRESSIONS = ("zlib", "zstd", "none")
CHECKSUMS = ("adler32", "crc32", "xxh3-128", "blake3")


class Compressor(Protocol):
    """Takes bytes piece by piece."""

    def compress(self, data: bytes, /) -> bytes:
        """Return what is done so far."""

    def flush(self) -> bytes:
        """Return the rest."""


class _Plain:
    def compress(self, data: bytes, /) -> bytes:
        return data

    def flush(self) -> bytes:
        return b""


def compressor(name: str) -> Compressor:
    """Return a new one of a format.

    Raises:
        CheckpointError: no such format.
        DependencyError: its package is missing.
    """
    one_of(name, COMPRESSIONS, "the compression of a delta", CheckpointError)
    if name == "none":
        return _Plain()
    if name == "zstd":
        return cast("Compressor", _zstandard().ZstdCompressor(level=1).compressobj())
    return cast("Compressor", _zlib().compressobj(1))


def inflated(
    name: str, pieces: Iterable[bytes], size_bytes: int, where: str, *, is_exact: bool = True
) -> Iterator[bytes]:
    """Yield what was compressed, which has so many bytes, in pieces of at most PIECE_BYTES.

    Args:
        name: of the format.
        pieces: the compressed bytes.
        size_bytes: of what comes out.
        where: what an error begins with.
        is_exact: False allows fewer.

    Raises:
        CheckpointError: it has more or fewer, or is damaged; or no such format.
        DependencyError: its package is missing.
    """
    one_of(name, COMPRESSIONS, "the compression of a delta", CheckpointError)
    unpacked = {"none": _as_it_is, "zstd": _inflated_zstd, "zlib": _inflated_zlib}[name](pieces)
    left = size_bytes
    while True:
        try:
            piece = next(unpacked, None)
        except LowshardError:
            raise
        except Exception as error:  # each library has errors of its own
            raise CheckpointError(f"{where}: its {name} data is damaged: {error}") from error
        if piece is None:
            break
        left -= len(piece)
        if left < 0:
            raise CheckpointError(f"{where}: its {name} data unpacks to more than {size_bytes} bytes")
        yield piece
    if left and is_exact:
        raise CheckpointError(
            f"{where}: its {name} data unpacks to {size_bytes - left} of {size_bytes} bytes: it is truncated, or of "
            "another tensor"
        )


def _as_it_is(pieces: Iterable[bytes]) -> Iterator[bytes]:
    yield from pieces


def _inflated_zlib(pieces: Iterable[bytes]) -> Iterator[bytes]:
    made = _zlib().decompressobj()
    for piece in pieces:
        while not made.eof:
            out = made.decompress(piece, PIECE_BYTES)
            piece = made.unconsumed_tail
            if out:
                yield out
            elif not piece:
                break
    if not made.eof:
        raise ValueError("it ends before its end mark")
    if made.unused_data:
        raise ValueError(f"{len(made.unused_data)} bytes follow its end mark")


def _inflated_zstd(pieces: Iterable[bytes]) -> Iterator[bytes]:
    made = _zstandard().ZstdDecompressor().stream_reader(_Joined(pieces))
    while out := made.read(PIECE_BYTES):
        yield out


class _Joined:
    """Pieces as a file that is read from."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces, self._left = iter(pieces), b""

    def read(self, size: int = -1) -> bytes:
        if not self._left:
            self._left = next(self._pieces, b"")
        out, self._left = self._left[:size], self._left[size:]
        return out


def _zlib() -> Any:
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib
    return isal_zlib


def _zstandard() -> Any:
    return _package("zstandard", "zstd")


def _package(name: str, what: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DependencyError(
            f"{what} needs the {name} package, which is not installed: pip install 'lowshard[deltas]'"
        ) from error


class Checksum:
    """A checksum of bytes that come piece by piece.

    Args:
        name: of CHECKSUMS.

    Raises:
        CheckpointError: no such checksum.
        DependencyError: its package is missing.
    """

    def __init__(self, name: str) -> None:
        one_of(name, CHECKSUMS, "the checksum of a delta", CheckpointError)
        self._routine: Callable[[bytes, int], int] | None = {"adler32": zlib.adler32, "crc32": crc32}.get(
            name
        )
        self._value = 1 if name == "adler32" else 0
        self._hash: Any = None
        if name == "xxh3-128":
            self._hash = _package("xxhash", "the checksum xxh3-128").xxh3_128()
        elif name == "blake3":
            self._hash = _package("blake3", "the checksum blake3").blake3()

    def update(self, data: bytes) -> None:
        """Add bytes."""
        if self._routine is not None:
            self._value = self._routine(data, self._value)
        else:
            self._hash.update(data)

    def hexdigest(self) -> str:
        """Return it as text."""
        return f"{self._value:08x}" if self._routine is not None else str(self._hash.hexdigest())
