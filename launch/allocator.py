"""What ranks do with the memory of arrays that are gone: give it back, or keep it for the next ones.

glibc gives every large array fresh pages from the system and returns them when it goes. Each page is cleared and
mapped anew at its first touch, which takes as long as filling it: a result that is allocated in a loop costs two to
three times what it costs in warm memory. Settings of glibc (its manual, "Memory Allocation Tunables") keep freed
memory in the process, up to a bound, as frameworks with allocators of their own do. They are not the default:
ranks then hold memory that their programs have freed, which counts where resident memory is bounded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from lowshard.settings import MALLOC

__all__ = ["allocator_environment"]

_MOST_BYTES, _LEAST_BYTES = 1 << 30, 64 << 20
_SHARE = 8  # of the machine's memory, all ranks together


def allocator_environment(
    base: Mapping[str, str], ranks_of_node: int, memory_bytes: int | None = None
) -> dict[str, str]:
    """Returns the variables under which glibc keeps the memory of freed arrays, if the environment asks for that.

    Other C libraries ignore them.

    Args:
        base: the environment. LOWSHARD_MALLOC=keep asks for it; own settings, MALLOC_* or GLIBC_TUNABLES, stay.
        ranks_of_node: how many ranks share a machine.
        memory_bytes: of the machine; asked of the system if None.

    Raises:
        LaunchError: LOWSHARD_MALLOC is something else.
    """
    if MALLOC.choice(base) == "system" or any(
        name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in base
    ):
        return {}
    if memory_bytes is None:
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    kept_bytes = min(_MOST_BYTES, max(_LEAST_BYTES, memory_bytes // _SHARE // ranks_of_node))
    # No array has pages of its own, and the end of the heap goes back to the system beyond what is kept.
    return {"GLIBC_TUNABLES": f"glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold={kept_bytes}"}
