"""MXFP8 transform of a reshard: quantises tensors before they are sent or as they arrive."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from lowshard import dtypes
from lowshard.argument import brief, choice, instance, items, mapping, one_of, truth, whole
from lowshard.box import Box, shape_of
from lowshard.errors import BufferMismatchError, KernelError, PlanError
from lowshard.foreign_array import READ_ONLY, host_of, is_foreign, like, view_of
from lowshard.kernels import (
    MXFP8Tensor,
    SwizzledMXFP8,
    cast,
    dequantize_mxfp8,
    quantize_mxfp8,
    unswizzle_scales,
)
from lowshard.kernels.buffer import is_gpu, place_of, require_array
from lowshard.kernels.mxfp8 import quantize_into_tiles
from lowshard.kernels.mxfp8_tensor import swizzled_bytes
from lowshard.kernels.reference import BLOCK_ELEMS, Elem, Mode
from lowshard.kernels.staging import assign
from lowshard.kernels.swizzle import put_scales, scale_place
from lowshard.reshard.scale_slice import scale_slice_from_data_slice
from lowshard.transfer.transform_contract import ReshardTransform, Slices

Array = Any


class MXFP8ReshardTransform(ReshardTransform):
    """Tensors that arrive in bf16 (or are converted before they leave) are stored as MXFP8, in place.

    Blocks of 32 lie along the last dim of the *destination's* local array, from its start. Their bytes are those of
    quantising the bf16 array as a whole, in both modes; fp32 and fp16 are rounded to bf16 first. The persistent
    buffers are written in place, and their addresses never change. In a `Refit` with buffering="double", its default,
    a twin of the transform has buffers of its own, and versions alternate between the two: what is served is in
    `Refit.weights`. Where addresses are to stay as they are from version to version (a CUDA graph reads them, say),
    refit with buffering="in_place".

    Args:
        convertible_params: names of the tensors to quantise, as the rank calls them.
        persistent_buffers: for each name (after `buffer_key_prefix`) what receives it: an `MXFP8Tensor`, a
            `SwizzledMXFP8`, or any object with `data` uint8 [rows, K] and `scale` uint8 [rows, K/32] or 1-D in the
            128x4 layout; `elem` is "e4m3" where it has none. A rank that only sends gives none.
        buffer_key_prefix: what stands before a name in persistent_buffers.
        convert_on_send: quantise before sending; 33/64 of the bytes of bf16. By default bf16 travels and the receiver
            quantises; the sender needs no transform then.
        elem: element type for senders without buffers.
        mode: how scales are chosen.
        misaligned: a box that does not begin and end at multiples of 32 in the last dim travels as it is and is
            quantised when its blocks are complete ("plain"), or is refused ("refuse").

    Raises:
        KernelError: a buffer that is not as described.
        BufferMismatchError: a buffer that cannot be written.
    """

    def __init__(
        self,
        convertible_params: Collection[str],
        persistent_buffers: Mapping[str, Any] | None = None,
        buffer_key_prefix: str = "",
        convert_on_send: bool = False,
        *,
        elem: Elem | None = None,
        mode: Mode = "rceil",
        misaligned: Literal["plain", "refuse"] = "plain",
    ) -> None:
        choice(misaligned, ("plain", "refuse"), "misaligned is 'plain' or 'refuse'", KernelError)
        rule = "convertible_params are the names of tensors, each text"
        given_names = (
            convertible_params.keys() if isinstance(convertible_params, Mapping) else convertible_params
        )
        names = items(given_names, rule, KernelError, any_order=True)
        self.convertible_params = frozenset(instance(name, str, rule, KernelError) for name in names)
        rule = "persistent_buffers is a mapping of names to what receives them, or None"
        given = {} if persistent_buffers is None else mapping(persistent_buffers, rule, KernelError)
        self.persistent_buffers = dict(given)
        self.buffer_key_prefix = instance(buffer_key_prefix, str, "buffer_key_prefix is text", KernelError)
        self.convert_on_send = truth(convert_on_send, "convert_on_send is True or False", KernelError)
        if elem is not None:
            choice(elem, get_args(Elem), f"elem is one of {', '.join(get_args(Elem))}, or None", KernelError)
        one_of(mode, get_args(Mode), "mode", KernelError)
        self.mode, self.misaligned = mode, misaligned
        self.quantized_elems = 0
        """Elements quantised so far on this rank, for the curious and for tests."""
        elems = {_checked(name, held) for name, held in self.persistent_buffers.items()}
        if len(elems) > 1:
            raise KernelError(
                f"the persistent buffers of a transform share one elem, got {sorted(elems)}; give all of them one, or "
                "move the others by a plan and a transform of their own"
            )
        if elem is not None and elems and elems != {elem}:
            raise KernelError(f"elem is {elem!r}, but the buffers hold {next(iter(elems))!r}")
        self.elem: Elem = elem if elem is not None else next(iter(elems), "e4m3")
        self._edges: dict[tuple[str, int], tuple[Array, Array]] = {}

    in_place = True

    # ---- the four methods

    def should_transform(self, param_name: str) -> bool:
        """Return whether a tensor is one of `convertible_params`."""
        return instance(param_name, str, "a tensor's name is text", KernelError) in self.convertible_params

    def prepare_send(self, param_name: str, src_slice: Slices, src_param: Array) -> list[Array]:
        """Return the slice, contiguous; with convert_on_send its codes and scales, row-major."""
        _need_slices(src_slice)
        source = require_array(src_param, "src_param")
        if len(src_slice) > source.ndim:
            raise KernelError(f"{param_name}: an array of {source.ndim} dims cannot be sliced by {src_slice}")
        part = source[src_slice]
        if not self.convert_on_send:
            return [like(_contiguous(part), src_param)]
        rows = _bf16(part)
        q = quantize_mxfp8(rows, self.elem, self.mode)
        self.quantized_elems += rows.size
        return [like(_contiguous(array), src_param) for array in (q.data, q.scale)]

    def prepare_recv(self, param_name: str, dst_slice: Slices) -> list[Array]:
        """Return receive buffers for the slice: bf16, or with convert_on_send its codes and scales, row-major."""
        held = self._held(param_name)
        box = self._box(held, dst_slice)
        if not self.convert_on_send or self.travels_plain(param_name, box):
            return [_empty(held.data, shape_of(box), dtypes.get("bfloat16").numpy)]
        scale_slice_from_data_slice(dst_slice, BLOCK_ELEMS)
        rows, cols = shape_of(box)
        return [
            _empty(held.data, (rows, cols), np.dtype(np.uint8)),
            _empty(held.data, (rows, cols // BLOCK_ELEMS), np.dtype(np.uint8)),
        ]

    def finalize_recv(self, param_name: str, dst_slice: Slices, recv_buffers: list[Array]) -> None:
        """Quantise the received bf16, or store the received codes and scales."""
        held = self._held(param_name)
        box = self._box(held, dst_slice)
        rule = "what was received is the one or two arrays of prepare_recv"
        came = [
            require_array(buffer, "a receive buffer") for buffer in items(recv_buffers, rule, KernelError)
        ]
        extents = shape_of(box)
        forms = [[extents], [extents, (*extents[:-1], -(-extents[-1] // BLOCK_ELEMS))]]
        if [buffer.shape for buffer in came] not in forms:
            raise KernelError(
                f"{rule}, of the shapes {forms[0]} or {forms[1]}, got {[b.shape for b in came]}"
            )
        if len(came) == 2:
            wrong = next((buffer.dtype for buffer in came if buffer.dtype != np.uint8), None)
            if wrong is not None:
                raise BufferMismatchError(f"codes and scales that were received are uint8, got {wrong}")
            self._store(held, box, *came)
            return
        self._quantize(param_name, held, box, _bf16(came[0]))

    # ---- beyond

    def send_rows(self, param_name: str, src_slice: Slices, src_param: Array, out: list[Array]) -> None:
        """Write a slice, or with convert_on_send its codes and scales, into contiguous arrays."""
        part = src_param[src_slice]
        if len(out) == 1:
            assign(out[0], part)
            return
        there = MXFP8Tensor(out[0], out[1], self.elem)
        quantize_mxfp8(_bf16(part), self.elem, self.mode, there)
        self.quantized_elems += part.size

    def recv_rows(self, param_name: str, dst_slice: Slices, came: list[Array]) -> None:
        """As `finalize_recv`."""
        self.finalize_recv(param_name, dst_slice, came)

    # ---- by blocks

    def change_block_elems(self, param_name: str, dst_box: Box) -> int:
        """Return the elements of an MX block, or 0 for a box that begins or ends within one."""
        return 0 if len(dst_box) != 2 or self.travels_plain(param_name, dst_box) else BLOCK_ELEMS

    def change_block_bytes(self, param_name: str, dtype: str) -> int:
        """Return the bytes sent for a block: its elements, or with convert_on_send its codes and scale."""
        return BLOCK_ELEMS + 1 if self.convert_on_send else BLOCK_ELEMS * dtypes.get(dtype).itemsize_bytes

    def make_blocks(self, param_name: str, blocks: Array) -> Array:
        """Return blocks as they are, or with convert_on_send the codes and scale of each."""
        if not self.convert_on_send:
            return blocks.view(np.uint8)
        q = quantize_mxfp8(_bf16(blocks), self.elem, self.mode)
        self.quantized_elems += blocks.size
        made = _empty(blocks, (len(blocks), BLOCK_ELEMS + 1), np.dtype(np.uint8))
        made[:, :BLOCK_ELEMS], made[:, BLOCK_ELEMS:] = q.data, q.scale
        return made

    def store_blocks(self, param_name: str, dtype: str, index: tuple[Array, ...], came: Array) -> None:
        """Quantise received blocks, or store the received codes and scales."""
        held = self._held(param_name)
        if self.convert_on_send:
            data, scale = came[:, :BLOCK_ELEMS], came[:, BLOCK_ELEMS]
        else:
            values = came.view(dtypes.get(dtype).numpy)
            q = quantize_mxfp8(_bf16(values), self.elem, self.mode)
            self.quantized_elems += values.size
            data, scale = q.data, q.scale[:, 0]
        rows, cols = index
        width = held.data.shape[1] // BLOCK_ELEMS
        at = _beside(held.data, rows), _beside(held.data, cols)
        held.data.reshape(len(held.data), width, BLOCK_ELEMS)[at] = data  # a view: a dim is split in two
        if held.scale.ndim == 2:
            held.scale[at] = scale
        else:
            held.scale[_beside(held.scale, scale_place(rows, cols, width))] = scale

    def take_over(self, param_name: str, dst_slice: Slices, other: MXFP8ReshardTransform) -> None:
        """Copy the codes and scales of a slice from another transform's buffers."""
        held, theirs = self._held(param_name), other._held(param_name)
        box = self._box(held, dst_slice)
        (r0, r1), (k0, k1) = box
        scale = theirs.scale if theirs.scale.ndim == 1 else theirs.scale[r0:r1, k0 // 32 : k1 // 32]
        self._store(held, box, theirs.data[r0:r1, k0:k1], scale)

    # ---- a run

    def begin(self) -> None:
        """Drop blocks that an earlier reshard left incomplete."""
        self._edges.clear()

    def end(self) -> None:
        """Raise PlanError if a block is incomplete."""
        for (name, block), (_, filled) in self._edges.items():
            if bool(filled.any()):
                rows = int(filled.any(axis=1).sum())
                raise PlanError(
                    f"{name}: block {block} of {rows} rows got {int(filled.sum())} of {rows * BLOCK_ELEMS} elements: "
                    "not all of it arrived"
                )
        self._edges.clear()

    def refit_weights(self) -> dict[str, Any]:
        """Return the persistent buffers of the quantised tensors, by name."""
        prefix = self.buffer_key_prefix
        held = self.persistent_buffers
        return {n: held[prefix + n] for n in sorted(self.convertible_params) if prefix + n in held}

    def twin(self) -> MXFP8ReshardTransform:
        """Return a transform like this one with persistent buffers of its own."""
        made = {place: _copy_of(held) for place, held in map(_placed, self.persistent_buffers.values())}
        buffers = {name: made[_placed(held)[0]] for name, held in self.persistent_buffers.items()}
        return MXFP8ReshardTransform(
            self.convertible_params, buffers, self.buffer_key_prefix, self.convert_on_send,
            elem=self.elem, mode=self.mode, misaligned=self.misaligned,
        )  # fmt: skip

    def send_format(self, param_name: str, src_box: Box, dtype: str) -> list[tuple[str, tuple[int, ...]]]:
        """Return dtype and shape of the arrays from `prepare_send`."""
        return self._format(src_box, dtype)

    def recv_format(self, param_name: str, dst_box: Box, dtype: str) -> list[tuple[str, tuple[int, ...]]]:
        """Return dtype and shape of the received arrays."""
        return self._format(dst_box, dtype)

    def travels_plain(self, param_name: str, dst_box: Box) -> bool:
        """Return whether a box begins or ends within a block."""
        return any(end % BLOCK_ELEMS for end in dst_box[-1])

    def check_refuses(self, param_name: str, dst_box: Box) -> str | None:
        """Return why a box cannot be received, or None."""
        if len(dst_box) != 2:
            return f"{param_name}: MXFP8 takes matrices [rows, K], got {len(dst_box)} dims"
        if self.misaligned == "refuse" and self.travels_plain(param_name, dst_box):
            return (
                f"{param_name}: columns {dst_box[-1]} are no multiples of {BLOCK_ELEMS}, the MX block; shard the "
                "tensor at multiples, or allow misaligned='plain'"
            )
        return None

    def _format(self, box: Box, dtype: str) -> list[tuple[str, tuple[int, ...]]]:
        shape = shape_of(box)
        if not self.convert_on_send or any(end % BLOCK_ELEMS for end in shape[-1:]):
            return [(dtype, shape)]
        return [("uint8", shape), ("uint8", (*shape[:-1], shape[-1] // BLOCK_ELEMS))]

    def _held(self, param_name: str) -> Any:
        instance(param_name, str, "a tensor's name is text", KernelError)
        try:
            held = self.persistent_buffers[self.buffer_key_prefix + param_name]
            return _Seen(held) if is_foreign(held.data, held.scale) else held
        except KeyError:
            raise KernelError(
                f"{param_name} is to be quantised, but persistent_buffers has no "
                f"{self.buffer_key_prefix + param_name!r}; it has {sorted(self.persistent_buffers)[:4]}"
            ) from None

    @staticmethod
    def _box(held: Any, dst_slice: Slices) -> Box:
        shape = held.data.shape
        _need_slices(dst_slice)
        if len(dst_slice) != 2:
            raise KernelError(f"a slice of a quantised matrix has two entries, got {dst_slice}")
        ends = (s.indices(n) for s, n in zip(dst_slice, shape, strict=True))
        return tuple((start, max(start, stop)) for start, stop, _ in ends)

    def _quantize(self, name: str, held: Any, box: Box, values: Array) -> None:
        (r0, r1), (k0, k1) = box
        first, last = -(-k0 // BLOCK_ELEMS) * BLOCK_ELEMS, k1 // BLOCK_ELEMS * BLOCK_ELEMS
        if first < last:
            part = values[:, first - k0 : last - k0]
            self.quantized_elems += part.size
            if held.scale.ndim == 2:
                at = slice(r0, r1), slice(first, last)
                there = MXFP8Tensor(held.data[at], held.scale[at[0], first // 32 : last // 32], self.elem)
                quantize_mxfp8(part, self.elem, self.mode, there, streaming=True)
            else:
                quantize_into_tiles(part, held.data, held.scale, r0, first, self.elem, self.mode)
        if first > last:  # within one block
            self._fill_edge(name, held, k0 // BLOCK_ELEMS, (r0, r1), (k0, k1), values)
            return
        if k0 < first:
            self._fill_edge(name, held, k0 // BLOCK_ELEMS, (r0, r1), (k0, first), values[:, : first - k0])
        if last < k1:
            self._fill_edge(name, held, last // BLOCK_ELEMS, (r0, r1), (last, k1), values[:, last - k0 :])

    def _fill_edge(
        self, name: str, held: Any, block: int, rows: tuple[int, int], span: tuple[int, int], values: Array
    ) -> None:
        """Store elements of a block that several boxes make up; quantise the rows that are complete."""
        key = (name, block)
        if key not in self._edges:
            shape = (held.data.shape[0], BLOCK_ELEMS)
            filled = _empty(held.data, shape, np.dtype(np.bool_))
            filled[...] = False
            self._edges[key] = (_empty(held.data, shape, dtypes.get("bfloat16").numpy), filled)
        kept, filled = self._edges[key]
        begin = block * BLOCK_ELEMS
        at = (slice(*rows), slice(span[0] - begin, span[1] - begin))
        if bool(filled[at].any()):
            raise PlanError(f"{name}: rows {rows}, columns {span} arrived twice")
        kept.view(np.uint16)[at] = values.view(np.uint16)
        filled[at] = True
        done = host_of(filled[slice(*rows)].all(axis=1))
        edges = np.flatnonzero(np.diff(np.concatenate(([False], done, [False])).astype(np.int8)))
        for start, stop in edges.reshape(-1, 2) + rows[0]:  # bands of rows that are complete now
            band = _contiguous(kept[start:stop])
            q = quantize_mxfp8(band, self.elem, self.mode)
            self.quantized_elems += band.size
            self._store(held, ((int(start), int(stop)), (begin, begin + BLOCK_ELEMS)), q.data, q.scale)
            filled[start:stop] = False

    @staticmethod
    def _store(held: Any, box: Box, data: Array, scale: Array) -> None:
        (r0, r1), (k0, k1) = box
        assign(held.data[r0:r1, k0:k1], data)
        c0, c1 = k0 // BLOCK_ELEMS, k1 // BLOCK_ELEMS
        if held.scale.ndim == 2:
            assign(held.scale[r0:r1, c0:c1], scale)
        else:
            put_scales(scale, held.scale, r0, c0, (r1 - r0, c1 - c0), held.data.shape[1] // BLOCK_ELEMS)


def ensure_sendable(tensor: Any, dtype: object = "bfloat16") -> Array:
    """Return an array that can be sliced and sent: a quantised tensor dequantised to bf16, an array as it is.

    Raises:
        DTypeError: `dtype` is none.
        KernelError: neither a quantised tensor (data and scale) nor an array.
    """
    dtypes.get(dtype)
    tensor = view_of(tensor, "what is sent")
    if isinstance(tensor, np.ndarray) or is_gpu(tensor):
        return tensor
    if not (hasattr(tensor, "data") and hasattr(tensor, "scale")):
        raise KernelError(
            "what is sent is a NumPy or CuPy array, another library's with DLPack, or a quantised tensor with data and "
            f"scale; got {type(tensor).__name__}"
        )
    elem: Elem = getattr(tensor, "elem", "e4m3")
    data, scale = view_of(tensor.data, "its data"), view_of(tensor.scale, "its scale")
    if scale.ndim == 1 and data.ndim == 2:
        scale = unswizzle_scales(scale, data.shape[0], data.shape[1] // BLOCK_ELEMS)
    return dequantize_mxfp8(MXFP8Tensor(data, scale, elem), dtype)


class _Seen:
    """A persistent buffer whose arrays, of any library, are viewed as NumPy's or CuPy's."""

    def __init__(self, held: Any) -> None:
        self.data, self.scale = view_of(held.data, "data"), view_of(held.scale, "scale")


def _placed(held: Any) -> tuple[object, Any]:
    return (place_of(view_of(held.data, "data")), place_of(view_of(held.scale, "scale"))), held


def _copy_of(held: Any) -> MXFP8Tensor | SwizzledMXFP8:
    data, scale = view_of(held.data, "data").copy(), view_of(held.scale, "scale").copy()
    kind = SwizzledMXFP8 if scale.ndim == 1 else MXFP8Tensor
    return kind(like(data, held.data), like(scale, held.scale), getattr(held, "elem", "e4m3"))


def _need_slices(given: object) -> None:
    rule = "a slice of a tensor is a tuple of slices without steps, one a dim"
    if not isinstance(given, tuple) or not all(isinstance(s, slice) for s in given):
        raise KernelError(f"{rule}, got {brief(given)}")
    for part in given:
        for end in (part.start, part.stop):
            if end is not None:
                whole(end, f"{rule}: {brief(given)}", KernelError)
        if part.step is not None:
            whole(part.step, f"{rule}: {brief(given)}", KernelError, 1, 1)


def _checked(name: str, held: Any) -> Elem:
    data, scale = view_of(getattr(held, "data", None), "data"), view_of(getattr(held, "scale", None), "scale")
    if data is None or scale is None or not hasattr(data, "dtype"):
        raise KernelError(f"{name}: a persistent buffer has data and scale, got {type(held).__name__}")
    if data.ndim != 2 or data.dtype != np.uint8 or scale.dtype != np.uint8 or data.shape[1] % BLOCK_ELEMS:
        raise KernelError(
            f"{name}: the codes of a persistent buffer are uint8 [rows, K], K a multiple of {BLOCK_ELEMS}, and its "
            f"scales uint8; got {data.dtype} {list(data.shape)} and {scale.dtype}"
        )
    for array in (data, scale):
        if isinstance(array, np.ndarray) and not array.flags.writeable:
            raise BufferMismatchError(f"{name}: a persistent buffer {READ_ONLY}")
    rows, cols = data.shape[0], data.shape[1] // BLOCK_ELEMS
    if scale.shape not in ((rows, cols), (swizzled_bytes(rows, cols),)):
        raise KernelError(
            f"{name}: the scales of {list(data.shape)} are [{rows}, {cols}], or [{swizzled_bytes(rows, cols)}] in "
            f"the 128x4 layout; got {list(scale.shape)}"
        )
    found: Elem = getattr(held, "elem", "e4m3")
    choice(
        found,
        get_args(Elem),
        f"{name}: the elem of a persistent buffer is {' or '.join(get_args(Elem))}",
        KernelError,
    )
    return found


def _bf16(values: Array) -> Array:
    row = dtypes.get(values.dtype)
    if row.name == "bfloat16":
        return values
    if row.name not in ("float16", "float32"):
        raise BufferMismatchError(f"MXFP8 is made of bf16, fp16 or fp32, got {row.name}")
    return cast(_contiguous(values), "bfloat16")


def _beside(array: Array, index: Array) -> Array:
    """Return an index on the array's device."""
    if is_gpu(array):
        import cupy

        return cupy.asarray(index)
    return index


def _contiguous(values: Array) -> Array:
    return values if values.flags.c_contiguous else values.copy()


def _empty(like: Array, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    if is_gpu(like):
        import cupy

        return cupy.empty(tuple(shape), dtype)
    return np.empty(tuple(shape), dtype)
