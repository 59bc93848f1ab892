"""What differs between two arrays: found, told by a short text (`change_encoding`), and written into a third array.

```
ChangeBoxes.find, write      which boxes, and who searches
  change_search: PlainSearch | CompiledSearch (kernels/cpu) | DeviceSearch (kernels/cuda)
```
"""

from __future__ import annotations

import numpy as np

from lowshard.kernels.buffer import Array, is_gpu
from lowshard.kernels.change_boxes import BoxUnits
from lowshard.kernels.change_encoding import Changes
from lowshard.kernels.change_search import ChangeSearch, ScratchBuffer
from lowshard.kernels.engine import engine_for, host_engine
from lowshard.kernels.plain_changes import PlainSearch


class ChangeBoxes(BoxUnits):
    """Boxes of an array whose changes are told together; arguments and errors as of `BoxUnits`."""

    def find(
        self, new: Array, old: Array, scratch: ScratchBuffer, may_stop: bool, may_step: bool = False
    ) -> Changes:
        """Return what is in `new` other than in `old`.

        Args:
            new: an array that has the boxes.
            old: another one of the same shape and dtype, of any strides; where units are blocks those of both lie in
                one piece.
            room: memory that is used.
            may_stop: no text is made where one of values takes more than 7/8 of what the boxes have.
            may_step: look for steps as well; not on a GPU.
        """
        if not self.units:
            return _NOTHING
        found = self._search(new).find(self, new, old, scratch, may_stop, may_step)
        if may_stop and found.encoded is not None and 8 * found.encoded.size > 7 * self.size_bytes:
            return found._replace(encoded=None, steps=None)
        return found

    def write(self, array: Array, changes: Changes) -> None:
        """Write what differs into an array that has the boxes.

        Raises:
            VerificationError: the text is none of these boxes; a part of it is written.
        """
        if changes.encoded is not None and changes.units:
            self._search(array).write(self, array, changes)

    def copy(self, source: Array, target: Array) -> None:
        """Copy the boxes from one array to another of the same shape and dtype beside it, each of any strides."""
        if self.units:
            engine_for(source, target).copy(source, target, self.table(source, target))

    def _search(self, array: Array) -> ChangeSearch:
        """Return what searches where an array lies."""
        if is_gpu(array):
            from lowshard.kernels.cuda.cuda_changes import device_search

            return device_search(array.device.id)
        if host_engine().name == "plain":
            return PlainSearch()
        from lowshard.kernels.cpu.compiled_changes import CompiledSearch

        return CompiledSearch() if CompiledSearch.takes(self) else PlainSearch()


_NOTHING = Changes(0, 0, 0, np.empty(0, np.uint8), 0)
