"""Torch's own checkpoints, read without torch: which box of which tensor lies where in which file.

HuggingFaceStorageWriter says in the metadata of a safetensors file (`DCP_SHARDING_INFO`) where in their tensors its
parts begin. A folder of torch.distributed.checkpoint has `.metadata`, a pickle of a few dataclasses, and files that are
runs of archives: what `torch.save` writes of one tensor, a zip of `data.pkl` and `data/0`.

A pickle is a program. None is run here: `inert` walks the opcodes and makes lists, dicts and records of names out of
them. Nothing is imported or called, and a name that is not in `CLASSES` is refused.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import BytesIO
from math import prod
from pathlib import Path
from pickletools import genops
from typing import Any

from lowshard import dtypes
from lowshard.argument import as_shape, brief, instance, mapping, quoted, wholes
from lowshard.box import strides_of
from lowshard.checkpoint.checkpoint_index import lies_beside
from lowshard.checkpoint.header import Header, Stamp, TensorEntry, open_for_reading, read_exactly, stamp_of
from lowshard.errors import CheckpointError, LowshardError
from lowshard.reading import parse_json

METADATA, OFFSETS = ".metadata", "DCP_SHARDING_INFO"
OWN_KEYS = (OFFSETS, "DCP_VERSION")
"""What torch says in a file's metadata of that file alone; not carried along."""

_META = "torch.distributed.checkpoint.metadata."
_STORED = "torch.distributed.checkpoint.filesystem._StorageInfo"
_STORAGES = {
    "float64": "Double", "float32": "Float", "float16": "Half", "bfloat16": "BFloat16", "int8": "Char",
    "uint8": "Byte", "int16": "Short", "int32": "Int", "int64": "Long", "bool": "Bool",
    "opaque C64": "ComplexFloat",
}  # fmt: skip
_DTYPES = {f"torch.{row.name}": row.name for row in dtypes.all_dtypes()} | {
    "torch.complex64": "opaque C64", "torch.float8_e4m3fnuz": "opaque F8_E4M3FNUZ",
    "torch.float8_e5m2fnuz": "opaque F8_E5M2FNUZ",
}  # fmt: skip
CLASSES = {
    _STORED, "torch.Size", "torch.serialization._get_layout", "pathlib.PosixPath", "pathlib._local.PosixPath",
    "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3", "torch.storage.UntypedStorage",
    "collections.OrderedDict", *(f"torch.{name}Storage" for name in _STORAGES.values()),
    *_DTYPES, f"{_META}Metadata", f"{_META}TensorStorageMetadata",
    f"{_META}TensorProperties", f"{_META}ChunkStorageMetadata", f"{_META}BytesStorageMetadata",
    f"{_META}MetadataIndex", f"{_META}StorageMeta", f"{_META}_MEM_FORMAT_ENCODING",
}  # fmt: skip
"""Every name that a pickle may have."""
_MOST_BYTES, _MOST_ARCHIVED_BYTES = 1 << 30, 1 << 16
"""Of `.metadata`, and of the pickle of one tensor."""
_VALUES = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"}
_NEW: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Placed:
    """A box of a tensor that lies row-major in a file: `entry` has the tensor's name and the box's shape."""

    file: str
    entry: TensorEntry
    start: tuple[int, ...]
    """Where in the tensor the box begins."""
    crc32: int | None = None


def saved_offsets(header: Header) -> dict[str, tuple[int, ...]] | None:
    """Return where in its tensor each part of a file begins, as torch has written it there; None for other files."""
    if OFFSETS not in header.metadata:
        return None
    where = f"{header.path}: {OFFSETS} in its metadata"
    said = parse_json(header.metadata[OFFSETS], where, CheckpointError)
    found = {}
    for name, entry in header.tensors.items():
        rule = f"{where}: saved_offsets of tensor {quoted(name)} are {len(entry.shape)} integers of 0 or more"
        own = mapping(mapping(said, rule, CheckpointError).get(name), rule, CheckpointError)
        found[name] = wholes(own.get("saved_offsets"), rule, CheckpointError, 0)
        if len(found[name]) != len(entry.shape):
            raise CheckpointError(f"{rule}, got {brief(found[name])}")
    return found


def read_folder(
    folder: Path,
) -> tuple[list[Placed], dict[str, tuple[str, tuple[int, ...]]], list[str], dict[str, Stamp | None]]:
    """Return each part, dtype and shape of each tensor, names of what is no tensor, and stamps. No tensor is read."""
    placed: list[Placed] = []
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    left_out: list[str] = []
    path, files, count = str(folder / METADATA), dict[str, int](), 0
    with ExitStack() as stack, _readable(path):

        def opened(file: str) -> int:
            if file not in files:
                files[file] = open_for_reading(file)
                stack.callback(os.close, files[file])
            return files[file]

        size_bytes = os.fstat(opened(path)).st_size
        if size_bytes > _MOST_BYTES:
            raise ValueError(f"it has {size_bytes} bytes, and at most {_MOST_BYTES} are read")
        root = _state(inert(read_exactly(files[path], size_bytes, 0, path)), f"{_META}Metadata")
        stored = {
            (_text(path, place["fqn"]), _size(path, place["offset"])): _state(info, _STORED)
            for index, info in root["storage_data"].items()
            if (place := _state(index, f"{_META}MetadataIndex")).get("offset") is not None
        }
        for name, said in root["state_dict_metadata"].items():
            if said.kind == f"{_META}BytesStorageMetadata":
                left_out.append(_text(path, name))
                continue
            tensor = _state(said, f"{_META}TensorStorageMetadata")
            dtype = _DTYPES[tensor["properties"].state[0].kind]
            shapes[_text(path, name)] = dtype, _size(path, tensor["size"])
            for chunk in tensor["chunks"]:
                count += 1
                own = _state(chunk, f"{_META}ChunkStorageMetadata")
                start, shape = _size(path, own["offsets"]), _size(path, own["sizes"])
                is_sound = len(start) == len(shape) == len(shapes[name][1])
                if not is_sound or count > size_bytes // 32:  # the same parts named again and again
                    raise ValueError(f"tensor {quoted(name)} has more parts than fit, or one of other dims")
                if 0 in shape:
                    continue
                info = stored[name, start]
                file = str(folder / info["relative_path"])
                if not lies_beside(info["relative_path"]) or not os.path.exists(file):
                    raise CheckpointError(
                        f"{file}: the file is missing, {METADATA} names it: it holds parts of {quoted(name)} and "
                        "perhaps of others. Put it back, or save the checkpoint anew"
                    )
                with _readable(f"{file}: tensor {quoted(name)}"):
                    entry, crc = _located(opened(file), file, TensorEntry(name, dtype, shape, 0, 0), info)
                placed.append(Placed(file, entry, start, crc))
        return placed, shapes, left_out, {file: stamp_of(fd) for file, fd in files.items() if file != path}


@contextmanager
def _readable(where: str) -> Iterator[None]:
    try:
        yield
    except LowshardError:
        raise
    except Exception as error:  # zipfile, pickletools and lookups raise what they like of what is damaged
        said = f"{type(error).__name__}: {brief(str(error))}"
        raise CheckpointError(f"{where}: cannot be read as torch's distributed checkpoint: {said}") from error


def _state(value: Any, kind: str) -> dict[Any, Any]:
    if not isinstance(value, _Record) or value.kind != kind or not isinstance(value.state, dict):
        raise ValueError(f"an object of {kind} is missing")
    return value.state


def _size(where: str, value: Any) -> tuple[int, ...]:
    if value.kind != "torch.Size":
        raise ValueError(f"a torch.Size is missing, got {value.kind}")
    (found,) = value.args
    return as_shape(found, f"{where}: a size is integers of 0 or more", CheckpointError)


def _text(where: str, value: Any) -> str:
    return instance(value, str, f"{where}: a name is text", CheckpointError)


# ---- archives


def _located(
    fd: int, file: str, part: TensorEntry, info: Mapping[str, Any]
) -> tuple[TensorEntry, int | None]:
    """Return where the elements of a part lie in its archive, which `.metadata` has placed, and their crc32."""
    rule = f"{file}: an archive has a first byte and a length"
    at, size_bytes = wholes((info["offset"], info["length"]), rule, CheckpointError, 0, 1 << 62)
    last = min(size_bytes, _MOST_ARCHIVED_BYTES)
    begin = at + size_bytes - last  # the directory is at the end: places in it count from here, also below 0
    with zipfile.ZipFile(BytesIO(read_exactly(fd, last, begin, file))) as archive:
        records = {record.filename.partition("/")[2]: record for record in archive.infolist()}

    def span(name: str) -> tuple[int, int]:
        head = begin + records[name].header_offset
        lengths = read_exactly(fd, 4, head + 26, file)  # of the name and the extra field behind 30 bytes
        first = head + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
        stop = first + records[name].file_size
        if records[name].compress_type or not at <= first <= stop <= at + size_bytes:
            raise ValueError(f"{name} of its archive is compressed, or lies outside of it")
        return first, stop

    def small(name: str) -> bytes:
        first, stop = span(name)
        if stop - first > _MOST_ARCHIVED_BYTES:
            raise ValueError(f"{name} of its archive has {stop - first} bytes")
        return read_exactly(fd, stop - first, first, file)

    if "byteorder" in records and small("byteorder") != b"little":
        raise ValueError("it was saved by a big-endian machine")
    storage, offset, shape, strides, _, _, *more = inert(small("data.pkl")).args
    _, kind, key, _, _ = storage.args
    held = (more[0] if more else kind).kind  # the dtype, or a class of storages of one
    if part.dtype != _DTYPES.get(held) and held != f"torch.{_STORAGES.get(part.dtype)}Storage":
        raise ValueError(f"its archive holds {held}, {METADATA} says {part.dtype}")
    first, stop = span(f"data/{_text(file, key)}")
    need = prod(part.shape) * dtypes.get(part.dtype).itemsize_bytes
    if shape != part.shape or offset != 0 or stop - first != need:
        raise ValueError(
            f"its archive holds {brief(shape)} in {stop - first} bytes, not {brief(part.shape)} in {need}"
        )
    if any(n > 1 and s != right for n, s, right in zip(shape, strides, strides_of(shape), strict=True)):
        raise ValueError(f"it is not stored row by row (strides {brief(strides)}): save contiguous() of it")
    return TensorEntry(part.name, part.dtype, part.shape, first, stop), records[f"data/{key}"].CRC or None


# ---- pickles


class _Record:
    """What a pickle would have called: by name, with its arguments and the state for what comes out of it."""

    __slots__ = ("args", "kind", "state")

    def __init__(self, kind: str, args: Any = None) -> None:
        self.kind, self.args = kind, args
        self.state: Any = None


def inert(raw: bytes) -> Any:
    """Return what a pickle says, with a record in place of each object; nothing is executed."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def taken(count: int | None) -> list[Any]:
        """Take so many values off the stack, or all above the last mark."""
        at = marks.pop() if count is None else len(stack) - count
        if not 0 <= at <= len(stack):
            raise ValueError("its stack is too short")
        found = stack[at:]
        del stack[at:]
        return found

    arg: Any
    for op, arg, _ in genops(raw):
        name = op.name
        if name in _VALUES:
            stack.append(arg)
        elif name in _NEW:
            stack.append(_NEW[name]())
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if name == "MEMOIZE" else arg] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[arg])
        elif name == "MARK":
            marks.append(len(stack))
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            module, called = arg.split(" ") if arg else taken(2)
            if type(module) is not str or type(called) is not str or f"{module}.{called}" not in CLASSES:
                raise ValueError(
                    f"it names {brief(module)} {brief(called)}, which is none of the classes that are read"
                )
            stack.append(_Record(f"{module}.{called}"))
        elif name.startswith("TUPLE"):
            stack.append(tuple(taken(int(name[5:]) if name[5:] else None)))
        elif name in ("REDUCE", "NEWOBJ"):
            made, args = taken(2)
            stack.append(_Record(made.kind, args))
        elif name == "BUILD":
            made, made.state = taken(2)
            stack.append(made)
        elif name in ("APPEND", "APPENDS"):
            values = taken(1 if name == "APPEND" else None)
            stack[-1].extend(values)
        elif name in ("SETITEM", "SETITEMS"):
            pairs = taken(2 if name == "SETITEM" else None)
            for key, value in zip(pairs[::2], pairs[1::2], strict=True):
                if not isinstance(
                    key, (str, _Record)
                ):  # the hash of tuples in tuples in ... overruns the C stack
                    raise ValueError(f"a key is text or an object, got one of {type(key).__name__}")
                stack[-1][key] = value
        elif name == "BINPERSID":
            stack.append(_Record("storage", *taken(1)))
        elif name == "STOP":
            (result,) = stack
            return result
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"it has the opcode {name}, which is not taken")
    raise ValueError("it has no end")
