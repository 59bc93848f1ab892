"""The safetensors header: a strict parser, and the encoder that writes the same bytes as the library.

The format, as safetensors 0.8 documents it: 8 bytes (little-endian length N of the header), N bytes
of JSON that start with `{` and may end in spaces, then the data. The JSON maps each tensor's name to
`{"dtype", "shape", "data_offsets": [begin, end]}`, offsets relative to the data; `__metadata__` maps
text to text. Elements are little-endian and row-major. The tensors cover the data whole: no overlap,
no hole, nothing behind the last.

A file that breaks any of this is refused before a byte of data is read. Unknown keys beside the three
are ignored, as the library does.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from types import MappingProxyType
from typing import Any

from lowshard import dtypes
from lowshard.argument import MOST_DIMS, instance, is_text, quoted
from lowshard.argument import path as check_path
from lowshard.box import Box, full_box, shape_of
from lowshard.errors import CheckpointError, DTypeError
from lowshard.nearest import nearest
from lowshard.reading import parse_json

FilePath = str | os.PathLike[str]
Stamp = tuple[int, int, int]
"""What tells a file from the one that replaces it: inode, bytes and time of the last change in ns.

Not the device: the hosts of one network file system number it differently.
"""

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
_PREFIX_BYTES = 8
TORCH = "torch.load it with weights_only=True, and safetensors.torch.save_file what comes"
_OTHER_FILES = {
    b"version https://git-lfs": "a Git LFS pointer in place of the file: fetch that with `git lfs pull`",
    b"<": "a page of a web server (HTML) in place of the file: download that anew, signed in where that is asked for",
    b"PK\3\4": f"a zip, as torch.save writes (.pt, .bin), and no safetensors file: {TORCH}",
    b"\x80": f"a pickle, as torch.save wrote before version 1.6, and no safetensors file: {TORCH}",
    b"GGUF": "a GGUF file and no safetensors file: take the model that it was made from",
    b"{": "JSON, an index or what a server answered, and no safetensors file: pass the checkpoint's folder",
    bytes(8): "empty, as a download or a save leaves it that did not end: fetch it anew",
}
"""What else lies under such names, by its first bytes, and what to do about it."""
_MAX_ARRAY_BYTES = 2**63 - 1  # NumPy's limit, empty dims left out
_METADATA = "__metadata__"
PACKED_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""Of elements that fill no whole byte. A header's shape counts them; elsewhere the last dim is in bytes."""

# The library stores wide elements first (so that all are aligned) and, within a width, in the
# reverse of its own dtype list; ties go by name.
_FILE_ORDER = {
    name: place
    for place, name in enumerate(
        ("U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16", "F8_E5M2FNUZ", "F8_E4M3FNUZ",
         "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "F6_E3M2", "F6_E2M3", "F4", "BOOL")
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file."""

    name: str
    dtype: str
    """Canonical name of the dtype table, such as bfloat16."""
    shape: tuple[int, ...]
    start: int
    """Its first byte, counted from the start of the file."""
    stop: int
    """The byte behind its last, counted likewise."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor."""
        return self.stop - self.start

    @property
    def size_elems(self) -> int:
        """Elements of the tensor."""
        return prod(self.shape)


@dataclass(frozen=True)
class Header:
    """What a safetensors file says it holds, checked."""

    path: str
    tensors: Mapping[str, TensorEntry]
    """By name, in the order of the data."""
    metadata: Mapping[str, str]
    """The file's `__metadata__`; empty where it has none."""
    data_start_bytes: int
    """Where the data starts in the file."""
    file_bytes: int
    """Size of the whole file."""
    has_metadata: bool = False
    """Whether it has a `__metadata__`, which may be empty."""
    stamp: Stamp | None = field(default=None, compare=False, repr=False)
    """Of the file that was read; None where nobody asked the system."""

    def entry(self, name: str) -> TensorEntry:
        """Return a tensor's entry.

        Raises:
            CheckpointError: the file has no such tensor.
        """
        found = self.tensors.get(instance(name, str, "a tensor's name is text", CheckpointError))
        if found is None:
            raise CheckpointError(
                f"{self.path}: tensor {quoted(name)} is not in the file, which holds {len(self.tensors)} "
                f"tensors{nearest(name, self.tensors)}"
            )
        return found


def read_header(path: FilePath) -> Header:
    """Return the checked header of a safetensors file; no tensor data is read.

    Raises:
        CheckpointError: the file is missing or is not a whole, well-formed safetensors file. The text
            names the file, the tensor where there is one, and what is wrong.
    """
    check_path(path, "a safetensors file is read from its path", CheckpointError)
    fd = open_for_reading(path)
    try:
        return header_from_fd(fd, path)
    finally:
        os.close(fd)


def open_for_reading(path: FilePath) -> int:
    """Return a descriptor of a regular file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO must not block us
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path}: there is no such file; give the path of a .safetensors file, or of a checkpoint's folder"
        ) from error
    except (OSError, TypeError, ValueError) as error:  # TypeError: no path; ValueError: one with a NUL in it
        raise CheckpointError(f"{path}: cannot be opened: {error}") from error
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        kind = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
        raise CheckpointError(f"{path}: is {kind}; give the path of one .safetensors file")
    return fd


def header_from_fd(fd: int, path: FilePath) -> Header:
    """Return the checked header of an open file; `path` is for messages. The offset does not move."""
    where = os.fspath(path)
    stamp = stamp_of(fd)
    file_bytes = stamp[1]
    if file_bytes < _PREFIX_BYTES:
        raise CheckpointError(
            f"{where}: a safetensors file starts with 8 bytes that give its header's length, "
            f"this one has {file_bytes} bytes"
        )
    length = int.from_bytes(read_exactly(fd, _PREFIX_BYTES, 0, where), "little")
    head = os.pread(fd, 32, 0).lstrip()
    other = next((found for start, found in _OTHER_FILES.items() if head.startswith(start)), None)
    if other is not None and (length > file_bytes or not length):
        raise CheckpointError(f"{where}: is {other}")
    if length > min(MAX_HEADER_BYTES, file_bytes - _PREFIX_BYTES):
        raise CheckpointError(
            f"{where}: the header's length is {length} bytes, the format allows {MAX_HEADER_BYTES} and only "
            f"{file_bytes - _PREFIX_BYTES} follow: this is not a safetensors file, or it is truncated or damaged"
        )
    raw = read_exactly(fd, length, _PREFIX_BYTES, where)
    if not raw.startswith(b"{"):
        raise CheckpointError(
            f"{where}: a header is a JSON object and starts with '{{', this one starts with {raw[:8]!r}"
        )
    fields = parse_json(raw, f"{where}: the header is not valid JSON", CheckpointError, MAX_HEADER_BYTES)
    given = fields.pop(_METADATA, None)
    metadata = {} if given is None else check_metadata(given, where)  # the library takes null for none too
    data_start = _PREFIX_BYTES + length
    entries = [_entry(name, value, data_start, file_bytes, where) for name, value in fields.items()]
    entries.sort(key=lambda e: (e.start, e.stop))
    _check_cover(entries, data_start, file_bytes, where)
    tensors = MappingProxyType({e.name: e for e in entries})
    return Header(
        where, tensors, MappingProxyType(metadata), data_start, file_bytes, given is not None, stamp
    )


def stamp_of(fd: int) -> Stamp:
    """Return the stamp of an open file."""
    found = os.fstat(fd)
    return found.st_ino, found.st_size, found.st_mtime_ns


def encode_header(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None,
    keep_order: bool = False,
) -> tuple[bytes, list[TensorEntry]]:  # fmt: skip
    """Return a file's bytes before the data, as the safetensors library writes them, and its entries in their order."""
    where = "a safetensors header"
    rows = {name: dtypes.get(dtype) for name, (dtype, _) in tensors.items()}
    for name, (_, shape) in tensors.items():
        check_name(name, where)
        _check_shape(shape, rows[name], f"{where}: tensor {quoted(name)}")
    fields: dict[str, Any] = {}
    if metadata is not None:
        fields[_METADATA] = dict(sorted(check_metadata(metadata, where).items()))
    spans: list[tuple[str, int, int]] = []
    begin, order = 0, list(tensors)
    size_bytes = {name: prod(shape) * rows[name].itemsize_bytes for name, (_, shape) in tensors.items()}
    starts = accumulate(size_bytes.values(), initial=0)
    if not keep_order or any(at % rows[n].itemsize_bytes for n, at in zip(order, starts, strict=False)):
        order.sort(key=lambda n: (_FILE_ORDER[rows[n].safetensors], n))
    for name in order:
        shape, end = tensors[name][1], begin + size_bytes[name]
        said = shape_of(header_box(rows[name].name, full_box(shape)))
        if in_memory(dtypes.from_safetensors(rows[name].safetensors), said) != (
            rows[name].name,
            tuple(shape),
        ):
            raise CheckpointError(
                f"{where}: tensor {quoted(name)}: {rows[name].name} {list(shape)} does not hold whole elements of "
                f"{PACKED_BITS[rows[name].safetensors]} bits: cut it elsewhere, or not at all"
            )
        fields[name] = {"dtype": rows[name].safetensors, "shape": list(said), "data_offsets": [begin, end]}
        spans.append((name, begin, end))
        begin = end
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{where} has at most {MAX_HEADER_BYTES} bytes, {len(tensors)} tensors and the metadata "
            f"need {len(text)}"
        )
    base = _PREFIX_BYTES + len(text)
    entries = [TensorEntry(n, rows[n].name, tuple(tensors[n][1]), base + b, base + e) for n, b, e in spans]
    return len(text).to_bytes(_PREFIX_BYTES, "little") + text, entries


def read_exactly(fd: int, size_bytes: int, offset: int, where: str) -> bytes:
    """Return bytes of an open file, or raise CheckpointError; `where` is for messages."""
    parts = []
    while size_bytes:
        try:
            part = os.pread(fd, size_bytes, offset)
        except OSError as error:
            raise CheckpointError(f"{where}: reading at byte {offset} failed: {error.strerror}") from error
        if not part:
            raise CheckpointError(
                f"{where}: ends at byte {offset}, {size_bytes} bytes are missing: the file is truncated"
            )
        parts.append(part)
        size_bytes -= len(part)
        offset += len(part)
    return b"".join(parts)


def check_name(name: object, where: str) -> None:
    """Raise CheckpointError unless a tensor can be called so in a header."""
    if not isinstance(name, str) or name == _METADATA or not is_text(name):
        raise CheckpointError(
            f"{where}: tensor {quoted(name)}: a name is Unicode text other than {_METADATA!r}: give it another"
        )


def check_metadata(value: Any, where: str) -> dict[str, str]:
    """Return a copy of a header's metadata, or raise CheckpointError where it cannot stand in one."""
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{where}: {_METADATA} maps text to text, got {quoted(value)}")
    for key, item in value.items():
        if not (isinstance(key, str) and isinstance(item, str) and is_text(key) and is_text(item)):
            raise CheckpointError(
                f"{where}: {_METADATA} maps text to text, got {quoted(key)}: {quoted(item)}"
            )
    return dict(value)


def _entry(name: str, value: Any, data_start: int, file_bytes: int, path: str) -> TensorEntry:
    where = f"{path}: tensor {quoted(name)}"
    if not is_text(name):
        raise CheckpointError(f"{where}: its name is no Unicode text (an escape is half a surrogate pair)")
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{where}: an entry is an object with dtype, shape and data_offsets, got {quoted(value)}"
        )
    if missing := [key for key in ("dtype", "shape", "data_offsets") if key not in value]:
        raise CheckpointError(f"{where}: its entry lacks {', '.join(missing)}; it has {quoted(list(value))}")
    try:
        row = dtypes.from_safetensors(value["dtype"])
    except DTypeError as error:
        raise CheckpointError(f"{where}: {error}") from error
    shape, offsets = value["shape"], value["data_offsets"]
    _check_shape(shape, row, where)
    need = prod(in_memory(row, tuple(shape))[1]) * row.itemsize_bytes
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_extent, offsets)):
        raise CheckpointError(
            f"{where}: data_offsets are two integers >= 0 (begin, end), got {quoted(offsets)}"
        )
    begin, end = offsets
    if end - begin != need:
        raise CheckpointError(
            f"{where}: {row.safetensors} {list(shape)} takes {need} bytes, its data_offsets [{begin}, {end}] "
            f"span {end - begin}"
        )
    if data_start + end > file_bytes:
        raise CheckpointError(
            f"{where}: its data ends at byte {data_start + end}, the file at {file_bytes}: the file is "
            "truncated, or its header is wrong"
        )
    return TensorEntry(name, *in_memory(row, tuple(shape)), data_start + begin, data_start + end)


def in_memory(row: dtypes.DType, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return the dtype and shape of the array that a tensor of a header is read as: of F4 and F6, bytes."""
    bits = PACKED_BITS.get(row.safetensors)
    if bits is None:
        return row.name, shape
    if shape and shape[-1] * bits % 8 == 0:
        return row.name, (*shape[:-1], shape[-1] * bits // 8)
    return f"{row.name}{list(shape)}", (-(-prod(shape) * bits // 8),)


def header_box(dtype: str, box: Box) -> Box:
    """Return a box of such an array in the coordinates of the header's shape."""
    bits = PACKED_BITS.get(dtypes.get(dtype).safetensors)
    if bits is None:
        return box
    if "[" in dtype:
        return full_box([int(n) for n in re.findall(r"\d+", dtype.partition("[")[2])])
    return (*box[:-1], (box[-1][0] * 8 // bits, box[-1][1] * 8 // bits))


def _check_shape(shape: Any, row: dtypes.DType, where: str) -> None:
    """Raise CheckpointError where no array can have the shape."""
    if not isinstance(shape, list | tuple) or not all(map(_is_extent, shape)):
        raise CheckpointError(f"{where}: a shape is a list of integers >= 0 and < 2^63, got {quoted(shape)}")
    if len(shape) > MOST_DIMS:
        raise CheckpointError(f"{where}: an array has at most {MOST_DIMS} dims, the shape has {len(shape)}")
    if prod(n for n in shape if n) * row.itemsize_bytes > _MAX_ARRAY_BYTES:
        raise CheckpointError(
            f"{where}: {row.safetensors} {quoted(list(shape))} is larger than any array can be"
        )


def _check_cover(entries: Iterable[TensorEntry], data_start: int, file_bytes: int, where: str) -> None:
    end, before = data_start, ""
    for entry in entries:
        name = f"tensor {quoted(entry.name)}"
        if entry.start < end:
            raise CheckpointError(
                f"{where}: {name} overlaps {before}: it starts at byte {entry.start}, that one ends at {end}"
            )
        if entry.start > end:
            raise CheckpointError(
                f"{where}: {name} starts at byte {entry.start}, but what comes before ends at {end}: the format "
                "allows no hole"
            )
        end, before = entry.stop, name
    if end != file_bytes:
        raise CheckpointError(
            f"{where}: {file_bytes - end} bytes follow the last tensor: the format allows none, so the file "
            "is damaged or its header is of another file"
        )


def _is_extent(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_ARRAY_BYTES
