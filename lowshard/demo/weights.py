"""The demo's weights: read in the training layout, moved to the serving layout, refitted to MXFP8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lowshard import DeviceMesh, Layout, RedistributePlan, dtypes, execute_all, plan_redistribute
from lowshard.checkpoint import CheckpointReader, Header
from lowshard.comm import Communicator
from lowshard.demo.demo_report import MatrixView
from lowshard.demo.encoder import EncoderConfig, flat_box, shard_view, tensor_parallel_specs
from lowshard.kernels import MXFP8Tensor, dequantize_mxfp8, quantize_mxfp8

Local = Mapping[str, np.ndarray]

_BLOCK_ELEMS = 32


@dataclass(frozen=True)
class Layouts:
    """Both layouts of every tensor of a checkpoint, and the plan between them."""

    training: Mapping[str, Layout]
    """Cut on dim 0 over all ranks."""
    serving: Mapping[str, Layout]
    """Attention and MLP weights cut over the axis tp, copied over the axis dp."""
    config: EncoderConfig | None

    @classmethod
    def of(cls, header: Header, config: EncoderConfig | None, dp: int, tp: int) -> Layouts:
        """Return the layouts of a checkpoint's tensors over dp x tp ranks.

        Raises:
            CheckpointError: a tensor's shape does not fit the config.
        """
        flat, grid = DeviceMesh((dp * tp,), ("fsdp",)), DeviceMesh((dp, tp), ("dp", "tp"))
        shapes = {name: entry.shape for name, entry in header.tensors.items()}
        specs = tensor_parallel_specs(config, shapes)
        training, serving = {}, {}
        for name, entry in header.tensors.items():
            view = shard_view(name, entry.shape, config)
            spec = specs[name]
            if config is None and len(view) > 1:  # nothing is known of the model: cut the last dim
                spec = (*[None] * (len(view) - 1), "tp")
            training[name] = Layout.from_spec(flat, view, entry.dtype, ("fsdp",) if view else ())
            serving[name] = Layout.from_spec(grid, view, entry.dtype, spec)
        return cls(training, serving, config)

    @cached_property
    def plans(self) -> dict[str, RedistributePlan]:
        """The plan of each tensor's move."""
        return {name: plan_redistribute(self.training[name], self.serving[name]) for name in self.training}

    def views(self, header: Header, count: int = 2) -> tuple[MatrixView, ...]:
        """Return who holds what of the first matrices that tp cuts, one cut by rows and one by columns."""
        found: dict[int, MatrixView] = {}
        for name, entry in header.tensors.items():
            after = self.serving[name]
            cut = next((d for d, s in enumerate(after.spec) if s == "tp"), None)
            if len(entry.shape) != 2 or cut is None:
                continue
            dim = 0 if cut == 0 else 1
            if dim in found:
                continue
            ranks = after.mesh.ranks
            by_heads = self.config is not None and after.shape != entry.shape
            found[dim] = MatrixView(
                name,
                (entry.shape[0], entry.shape[1]),
                tuple(flat_box(name, self.training[name].box(r), self.config) for r in ranks),
                tuple(flat_box(name, after.box(r), self.config) for r in ranks),
                head_dim=dim if by_heads else None,
                num_heads=self.config.num_heads if by_heads and self.config else 1,
            )
        return tuple(found[d] for d in sorted(found))[:count]


def read_training(reader: CheckpointReader, layouts: Layouts, rank: int) -> dict[str, np.ndarray]:
    """Return this rank's shard of every tensor, read from its own byte ranges of the file."""
    return {name: reader.read(name, lay, rank, reshape=True) for name, lay in layouts.training.items()}


def move_to_serving(local: Local, layouts: Layouts, comm: Communicator) -> dict[str, np.ndarray]:
    """Return this rank's part of every tensor in the serving layout.

    Collective: all ranks of the communicator call this.
    """
    # Every rank is in the serving mesh, so none gets None.
    return {name: np.asarray(array) for name, array in execute_all(layouts.plans, local, comm).items()}


def count_wrong(local: Local, layouts: Layouts, reader: CheckpointReader, rank: int) -> tuple[int, int]:
    """Return how many elements of this rank's serving weights differ from the file in any bit, and of how many."""
    wrong = elems = 0
    for name, layout in layouts.serving.items():
        true = reader.read(name, layout, rank, reshape=True)
        as_bits = np.dtype(f"u{layout.itemsize_bytes}")  # NaN equals itself, -0 is not 0
        mine = np.ascontiguousarray(local[name]).reshape(-1).view(as_bits)
        wrong += int(np.count_nonzero(mine != true.reshape(-1).view(as_bits)))
        elems += true.size
    return wrong, elems


class MXFP8Buffers:
    """Serving weights in persistent MXFP8 buffers; a refit writes into them and never moves them."""

    def __init__(self, layouts: Layouts, rank: int) -> None:
        self._layouts, self._rank = layouts, rank
        self.tensors: dict[str, MXFP8Tensor] = {}
        self._staged: dict[str, np.ndarray] = {}
        for name in self.quantised_names(layouts):
            layout = layouts.serving[name]
            shape = layout.local_shape(rank)
            scale_shape = (*shape[:-1], shape[-1] // _BLOCK_ELEMS)
            self.tensors[name] = MXFP8Tensor(np.zeros(shape, np.uint8), np.zeros(scale_shape, np.uint8))
            self._staged[name] = np.zeros(shape, layout.numpy_dtype)
        self._plans = {name: layouts.plans[name] for name in self.tensors}

    @staticmethod
    def quantised_names(layouts: Layouts) -> list[str]:
        """Return the matrices that fit MXFP8 on every rank: floats, cut in whole blocks of 32."""
        return [
            name
            for name, lay in layouts.serving.items()
            if len(lay.shape) > 1
            and "embeddings" not in name
            and not name.endswith("bias")  # laid out by heads, a bias has two dims too
            and dtypes.get(lay.dtype).name in ("float32", "bfloat16", "float16")
            and all(lay.local_shape(r)[-1] % _BLOCK_ELEMS == 0 for r in lay.mesh.ranks)
        ]

    def refit(self, training: Local, comm: Communicator) -> None:
        """Move every quantised weight from the training layout and quantise it into its buffers.

        Collective: all ranks of the communicator call this.
        """
        wanted = {name: training[name] for name in self._plans}
        execute_all(self._plans, wanted, comm, out=self._staged)
        for name, target in self.tensors.items():
            quantize_mxfp8(self._staged[name], out=target)

    def addresses(self) -> tuple[int, ...]:
        """Return where every buffer lies."""
        return tuple(a.ctypes.data for q in self.tensors.values() for a in (q.data, q.scale))

    def nbytes(self) -> int:
        """Return the bytes of all buffers of this rank."""
        return sum(q.wire_bytes for q in self.tensors.values())

    def count_wrong(self, reader: CheckpointReader) -> tuple[int, int]:
        """Return how many codes and scales differ from quantising the file's own values, and of how many."""
        wrong = total = 0
        for name, held in self.tensors.items():
            true = quantize_mxfp8(reader.read(name, self._layouts.serving[name], self._rank, reshape=True))
            wrong += int(
                np.count_nonzero(true.data != held.data) + np.count_nonzero(true.scale != held.scale)
            )
            total += held.wire_bytes
        return wrong, total

    def weights(self, others: Local) -> dict[str, Any]:
        """Return weights for a forward pass: what is quantised decoded to bf16, the rest as it is."""
        return {
            name: dequantize_mxfp8(self.tensors[name], "bfloat16") if name in self.tensors else array
            for name, array in others.items()
        }
