"""Differences of host arrays by compiled code."""

from __future__ import annotations

import numpy as np

from lowshard.errors import VerificationError
from lowshard.kernels.buffer import Array, address
from lowshard.kernels.change_boxes import BoxUnits, ScratchBuffer
from lowshard.kernels.change_encoding import STEP_BYTES, Changes
from lowshard.kernels.cpu import cpu_changes as cpu
from lowshard.kernels.cpu.memory_steps import CACHE_LINE_BYTES


class CompiledSearch:
    """Searches host memory, at the speed of reading it."""

    @staticmethod
    def takes(boxes: BoxUnits) -> bool:
        """Return whether there are kernels for these units: elements of 1 to 8 bytes, or blocks of cache lines."""
        by_line = boxes.block_elems == 1 or boxes.unit_bytes % CACHE_LINE_BYTES == 0
        return by_line and boxes.itemsize in cpu.WIDTHS

    def find(
        self, boxes: BoxUnits, new: Array, old: Array, scratch: ScratchBuffer, may_stop: bool, may_step: bool
    ) -> Changes:
        """Compare elements, in one pass over both arrays."""
        kernel = cpu.find_kernel(boxes.itemsize, boxes.block_elems > 1)
        may_step = may_step and boxes.has_steps
        gaps, lengths, values, steps = scratch.streams(
            boxes.units, boxes.unit_bytes, STEP_BYTES[boxes.itemsize] if may_step else 0
        )
        state = np.zeros(cpu.STATE_ELEMS, np.int64)
        state[cpu.TOTAL], state[cpu.MAY_STOP], state[cpu.MAY_STEP] = boxes.units, may_stop, may_step
        table = boxes.table(new, old)
        kernel(
            table.columns, address(new), address(old), boxes.unit_bytes, address(gaps), address(lengths),
            address(values), address(steps), state, address(scratch.aligned(cpu.FIND_SCRATCH_BYTES)),
        )  # fmt: skip
        changed = int(state[cpu.CHANGED])
        if state[cpu.STOPPED]:
            # Dense at its begin, and not later?
            if 9 * state[cpu.HIT] * boxes.unit_bytes < 8 * boxes.size_bytes:
                return self.find(boxes, new, old, scratch, False, may_step)
            return Changes(int(state[cpu.HIT]), 0, 0, None, changed)
        sizes = [int(state[i]) for i in (cpu.VALUES, cpu.GAPS, cpu.LENGTHS, cpu.STEPS)]
        encoded = np.concatenate([values[: sizes[0]], gaps[: sizes[1]], lengths[: sizes[2]]])
        found = steps[: sizes[3]].copy() if may_step else None
        return Changes(sizes[0] // boxes.unit_bytes, sizes[1], sizes[2], encoded, changed, 0, found)

    def write(self, boxes: BoxUnits, array: Array, changes: Changes) -> None:
        """Write units run by run."""
        boxes.check(changes, boxes.unit_bytes)
        kernel = cpu.write_kernel(
            boxes.unit_bytes if boxes.unit_bytes in cpu.WIDTHS else 0, changes.steps_bytes > 0
        )
        begin = address(changes.encoded)
        gaps = begin + changes.values_bytes(boxes.unit_bytes)
        lengths = gaps + changes.gaps_bytes
        end = lengths + changes.lengths_bytes
        table = boxes.table(array, array)
        scratch = np.empty(cpu.WRITE_SCRATCH_BYTES, np.uint8)
        if kernel(
            table.columns, address(array), gaps, lengths, lengths, end, begin, changes.units, boxes.unit_bytes,
            address(scratch),
        ):  # fmt: skip
            raise VerificationError(boxes.wrong("its runs lead out of the boxes, or end early"))
