"""Arrays of other libraries, seen as NumPy's or CuPy's over the same memory, and results given back as theirs.

This is the one place that knows torch, JAX and the protocols (DLPack, `__cuda_array_interface__`, buffers). It imports
no library: where an array of one came, somebody has imported it. CuPy alone is imported, for arrays on a GPU.

NumPy's DLPack knows neither bf16 nor fp8. A torch tensor of these is seen through its view as integers of as many bits;
JAX gives them to NumPy itself. On a GPU all arrays come through DLPack, which makes CuPy's current stream wait for
what the producer's stream was given before.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from typing import Any

import numpy as np

from lowshard import dtypes
from lowshard.argument import brief
from lowshard.errors import BufferMismatchError, DependencyError, LowshardError

Array = Any  # a NumPy or CuPy array; CuPy ships no types
Seen = Callable[[Any, str], Array]

READ_ONLY = (
    "is written to, but the array is read-only: such arrays (JAX's always are) are sources only; pass one that can be "
    "written"
)
"""What errors say of a result that cannot be written."""

_HOST_TYPES = (1, 3, 11)  # DLDeviceType: kDLCPU, kDLCUDAHost, kDLROCMHost
_GPU_TYPES = (2, 10, 13)  # kDLCUDA, kDLROCM, kDLCUDAManaged
_NEVER = (type(None), str, bool, int, float, complex, list, tuple, dict, set, frozenset, np.generic)


@lru_cache(256)
def is_cupy(kind: type) -> bool:
    """Say whether a type is that of CuPy's arrays. Asked of the type: that runs no code of a foreign array."""
    return _root_of(kind) == "cupy" and hasattr(kind, "__cuda_array_interface__")


def is_foreign(*values: object) -> bool:
    """Say whether one of some values is an array of another library than NumPy and CuPy."""
    for value in values:  # noqa: SIM110  # a generator takes longer than the rest
        if _is_foreign(value):
            return True
    return False


def never_change(arrays: Iterable[object]) -> bool:
    """Say whether there are arrays, and all of them are of a library whose arrays never change (JAX)."""
    ways = [_way_to_see(type(array)) for array in arrays]  # type: ignore[arg-type]  # types can be hashed
    return bool(ways) and all(way is _jax_view for way in ways)


def view_of(value: object, name: str, writes: bool = False) -> Array:
    """Return an array of another library as NumPy's or CuPy's over the same memory, and anything else as it is.

    It may be kept: from then on torch refuses, for good, to resize the storage of a tensor on the host. `writes` asks
    whether it can be written to, which CuPy's arrays do not say.
    """
    return _seen_by(_way_to_see(type(value)), value, name, writes)  # type: ignore[arg-type]  # types can be hashed


def view_in_call(value: object, name: str, writes: bool = False) -> Array:
    """As `view_of`, for as long as a call is under way: torch may free or resize the storage afterwards."""
    see = _way_to_see(type(value))  # type: ignore[arg-type]  # types can be hashed
    return _seen_by(_torch_view_in_call if see is _torch_view else see, value, name, writes)


def _seen_by(see: Seen, value: Any, name: str, writes: bool) -> Array:
    if see is _as_it_is or (see is _buffer_view and not _has_buffer(value)):
        if isinstance(value, np.ndarray):
            require_native(value, name)
        is_sub = type(value) is not np.ndarray and isinstance(value, np.ndarray)
        return base_view(value, name) if is_sub else value
    try:
        seen = see(value, name)
        if writes and not isinstance(seen, np.ndarray):
            told = value.__cuda_array_interface__["data"][1] if see is _cuda_view else see is _jax_view
            if told:
                raise BufferMismatchError(f"{name} {READ_ONLY}")
        return seen
    except LowshardError:
        raise
    except Exception as error:  # foreign code raises what it likes
        raise BufferMismatchError(
            f"{name} cannot be seen as an array ({_kind(value)}): {type(error).__name__}: {brief(str(error))}; pass a "
            "NumPy array, or one of a library whose arrays have DLPack"
        ) from error


def base_view(array: np.ndarray, name: str) -> np.ndarray:
    """Return NumPy's array as a plain one: a subclass, such as matrix, may slice and reshape in ways of its own."""
    if type(array) is not np.ndarray and isinstance(array, np.ma.MaskedArray):
        raise BufferMismatchError(
            f"{name} is an array without a mask, which would be lost; pass {_call(name, 'filled(value)')} or its .data"
        )
    return array.view(np.ndarray)


def require_native(array: Array, name: str) -> None:
    """Raise BufferMismatchError where the bytes of an array's elements are in another order than the machine's."""
    if not array.dtype.isnative:
        raise BufferMismatchError(
            f"{name} is in the machine's byte order, got {array.dtype.str}; pass "
            f"{_call(name, 'astype')}({_call(name, 'dtype')}.newbyteorder('='))"
        )


def view_or_same(value: object, writes: bool = False) -> Any:
    """As `view_in_call`, and where that raises the value itself, for the call that is to take it."""
    try:
        return view_in_call(value, "array", writes)
    except LowshardError:
        return value


def like(result: Any, given: object = None, *, apart: bool = False) -> Any:
    """Return a new NumPy or CuPy array as one of the library that an input is of, over the same memory.

    JAX takes memory that begins on a cache line as it is, and copies the rest. With `apart` torch, which has no
    read-only tensors, gets a copy where the result is read-only since its memory is another array's too.
    """
    kind = type(given)
    if kind is np.ndarray or result is None or not _is_foreign(given) or _is_foreign(result):
        return result
    if _is_torch(kind):
        is_read_only = isinstance(result, np.ndarray) and not result.flags.writeable
        return _to_torch(result.copy() if apart and is_read_only else result)
    if _is_jax(kind):
        return _to_jax(result, given)
    namespace = getattr(kind, "__array_namespace__", None)  # of the array API standard
    if namespace is not None:
        return namespace(given).from_dlpack(result)
    return result


def host_of(array: Array) -> np.ndarray:
    """Return an array of NumPy or CuPy as one of the host: itself, or a copy."""
    found: np.ndarray = array if isinstance(array, np.ndarray) else array.get()
    return found


def gpu_of(value: object) -> int | None:
    """Return the number of the GPU that an array of any library lies on; None for the host, and for no array."""
    kind: Any = type(value)
    if is_cupy(kind):
        return int(value.device.id)  # type: ignore[attr-defined]
    if kind is np.ndarray or not hasattr(kind, "__dlpack_device__"):
        return None
    try:
        place, number = value.__dlpack_device__()  # type: ignore[attr-defined]
    except Exception:  # what is wrong with it is told where it is taken
        return None
    return int(number) if place in _GPU_TYPES else None


# ---- which library


def _is_foreign(value: object) -> bool:
    see = _way_to_see(type(value))  # type: ignore[arg-type]  # types can be hashed
    return see is not _as_it_is and (see is not _buffer_view or _has_buffer(value))


@lru_cache(256)
def _way_to_see(kind: Any) -> Seen:
    """Return how to see an array of a type. What nothing says otherwise of may have a buffer: only objects tell."""
    if issubclass(kind, (np.ndarray, *_NEVER)) or is_cupy(kind):
        return _as_it_is
    if _is_torch(kind):
        return _torch_view
    if _is_jax(kind):
        return _jax_view
    if hasattr(kind, "__dlpack__") and hasattr(kind, "__dlpack_device__"):
        return _dlpack_view
    if hasattr(kind, "__cuda_array_interface__"):
        return _cuda_view
    return _buffer_view


def _as_it_is(value: Any, name: str) -> Array:
    return value


def _root_of(kind: type) -> str:
    return str(getattr(kind, "__module__", "")).partition(".")[0]


def _is_torch(kind: type) -> bool:
    return any(base.__name__ == "Tensor" and base.__module__ == "torch" for base in kind.__mro__)


def _is_jax(kind: type) -> bool:
    return _root_of(kind) in ("jax", "jaxlib") and hasattr(kind, "__dlpack__")


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


# ---- torch


@cache
def _torch_bits() -> dict[Any, tuple[Any, np.dtype[Any]]]:
    """Return, for torch's dtypes that NumPy lacks, torch's integers of as many bits and the dtype of the view."""
    torch = sys.modules["torch"]
    found = {}
    for row in dtypes.all_dtypes():
        if not row.in_numpy and hasattr(torch, row.name):
            found[getattr(torch, row.name)] = (torch.int16 if row.bits == 16 else torch.uint8, row.numpy)
    return found


@cache
def _torch_dtypes() -> dict[Any, np.dtype[Any]]:
    torch = sys.modules["torch"]
    return {getattr(torch, row.name): row.numpy for row in dtypes.all_dtypes() if hasattr(torch, row.name)}


def _torch_view_in_call(tensor: Any, name: str) -> Array:
    """Return an array over a plain tensor's storage that torch does not know of."""
    torch = sys.modules["torch"]
    dtype = _torch_dtypes().get(tensor.dtype)
    plain = type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter
    if dtype is None or not plain or not tensor.is_cpu or tensor.requires_grad or tensor.is_neg():
        return _torch_view(tensor, name)
    try:
        storage, end = tensor.untyped_storage(), _torch_end(tensor)
        begin, size_bytes = storage.data_ptr(), storage.nbytes()
    except Exception:  # sparse, or within vmap: what it is is told there
        return _torch_view(tensor, name)
    if not end or not begin or end > size_bytes:
        return _torch_view(tensor, name)
    memory: Any = _memory_of(size_bytes).from_address(begin)
    memory.tensor = tensor  # kept by the array
    start, strides = tensor.storage_offset() * dtype.itemsize, [n * dtype.itemsize for n in tensor.stride()]
    return np.ndarray(tuple(tensor.shape), dtype, memory, start, strides)


@lru_cache(256)
def _memory_of(size_bytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    return ctypes.c_char * size_bytes


def _torch_end(tensor: Any) -> int:
    """Return how many bytes of its storage a tensor reaches to; 0 without elements."""
    if not tensor.numel():
        return 0
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + last + 1) * int(tensor.element_size())


def _torch_view(tensor: Any, name: str) -> Array:
    bits = _torch_bits().get(tensor.dtype)
    cause: Exception | None = None
    try:
        # NumPy would give memory of its own for a storage that has none.
        if tensor.is_cpu and not hasattr(tensor, "to_local"):
            end, size_bytes = _torch_end(tensor), tensor.untyped_storage().nbytes()
            if end > size_bytes:
                raise BufferMismatchError(
                    f"{name} is a torch tensor that needs {end} bytes of its storage, which has {size_bytes}, as "
                    "after untyped_storage().resize_(0); resize it back first"
                )
        if tensor.is_cpu:
            if bits is None:
                return tensor.numpy()
            if not tensor.requires_grad:  # its view as integers would not say so
                return tensor.view(bits[0]).numpy().view(bits[1])
        elif tensor.is_cuda and not (tensor.requires_grad or tensor.is_neg() or hasattr(tensor, "to_local")):
            seen = _cupy().from_dlpack(tensor if bits is None else tensor.view(bits[0]))
            return seen if bits is None or bits[1].itemsize == 1 else seen.view(bits[1])
    except LowshardError:
        raise
    except Exception as error:  # torch says what it cannot do in many classes
        cause = error
    raise _torch_error(tensor, name, cause) from cause


def _torch_error(tensor: Any, name: str, cause: Exception | None) -> LowshardError:
    """Return what is wrong with a tensor, and what to pass."""
    if wrong := _why_not(tensor):
        what, method = wrong
        return BufferMismatchError(f"{name} is a torch tensor {what}; pass {_call(name, method)}")
    try:
        dtypes.get(tensor.dtype)
    except LowshardError as error:
        return error
    return BufferMismatchError(
        f"{name} is a torch tensor ({_kind(tensor)}) whose memory torch does not give: {brief(str(cause))}; pass a "
        "plain torch.Tensor with memory of its own"
    )


def _why_not(tensor: Any) -> tuple[str, str] | None:
    """Return what keeps a tensor from being seen as an array, and the method of it that helps."""
    if hasattr(tensor, "to_local"):
        return "over several ranks, a DTensor, and lowshard takes this rank's part", "to_local()"
    if str(tensor.layout) != "torch.strided":
        return f"in the layout {tensor.layout}, and lowshard takes dense ones", "to_dense()"
    if tensor.is_meta:
        return "on the device 'meta', which has no memory; make one that has, then", "copy_(values)"
    if not (tensor.is_cpu or tensor.is_cuda):
        return (
            f"on the device '{tensor.device}', and lowshard takes those on the CPU and on CUDA's GPUs",
            "cpu()",
        )
    if tensor.requires_grad:
        return "that requires grad, and lowshard records no gradients", "detach()"
    if tensor.is_conj():
        return "whose memory holds other values than it has (conj bit)", "resolve_conj()"
    return (
        ("whose memory holds other values than it has (neg bit)", "resolve_neg()")
        if tensor.is_neg()
        else None
    )


def _call(name: str, method: str) -> str:
    """Return what to write: the method of what a message calls `name`, or of x where that is no name in a program."""
    return f"{name if all(map(str.isidentifier, name.split('.'))) else 'x'}.{method}"


def _to_torch(result: Array) -> Any:
    torch = sys.modules["torch"]
    row = dtypes.get(result.dtype)
    whole = result if row.in_numpy else result.view(np.int16 if row.bits == 16 else np.uint8)
    if not isinstance(result, np.ndarray):
        made = torch.from_dlpack(whole)
    else:
        # torch has no read-only tensors, and warns of an array that is.
        made = torch.from_numpy(whole if whole.flags.writeable else np.asarray(_Writeable(whole)))
    return made if row.in_numpy else made.view(getattr(torch, row.name))


class _Writeable:
    """Memory of a read-only array for a library that has no read-only ones; keeps the array."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        interface = dict(array.__array_interface__)
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


# ---- JAX


def _jax_view(array: Any, name: str) -> Array:
    try:
        devices = array.sharding.device_set
    except AttributeError:
        raise BufferMismatchError(
            f"{name} is JAX's ({_kind(array)}) and has no memory, as within jit; call lowshard outside of it"
        ) from None
    if len(devices) != 1:
        raise BufferMismatchError(
            f"{name} is a JAX array over {len(devices)} devices, and lowshard takes what lies on one; pass "
            f"{_call(name, 'addressable_shards[i].data')}"
        )
    if next(iter(devices)).platform != "cpu":
        return _dlpack_view(array, name)
    seen: Array = np.asarray(array)  # read-only, and JAX's own memory
    return seen


def _to_jax(result: Array, given: Any) -> Any:
    jax = sys.modules["jax"]
    if not isinstance(result, np.ndarray):
        return jax.dlpack.from_dlpack(result)
    return jax.device_put(result, next(iter(given.sharding.device_set)), may_alias=True)


# ---- protocols


def _dlpack_view(array: Any, name: str) -> Array:
    place = array.__dlpack_device__()[0]
    if place in _GPU_TYPES:
        return _cupy().from_dlpack(array)
    if place not in _HOST_TYPES:
        raise BufferMismatchError(
            f"{name} lies on a device of DLPack's type {int(place)}, and lowshard takes arrays on the CPU and on "
            "CUDA's GPUs; copy it to the host"
        )
    return np.from_dlpack(array)


def _cuda_view(array: Any, name: str) -> Array:
    return _cupy().asarray(array)


def _buffer_view(value: Any, name: str) -> Array:
    if _kind(value) in ("mpi4py.MPI.InPlaceType", "mpi4py.MPI.BottomType"):  # they read as empty bytes
        raise BufferMismatchError(
            f"{name} is an array, got a mark of mpi4py such as MPI.IN_PLACE; in place one array is both send and recv, "
            "or the smaller one is this rank's part of the other"
        )
    return np.asarray(memoryview(value))


def _has_buffer(value: Any) -> bool:
    try:
        memoryview(value)
    except TypeError:
        return False
    except Exception:  # it has one, and something is wrong with it
        return True
    return True


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise DependencyError(
            "an array on a GPU is seen through CuPy, which is not installed; pip install 'lowshard[cuda13]' (or cuda12)"
        ) from error
    return cupy
