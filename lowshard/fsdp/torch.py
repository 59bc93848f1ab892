"""Where users find `ShardedModule`."""

from __future__ import annotations

from lowshard.fsdp.sharded_module import ShardedModule

__all__ = ["ShardedModule"]


def __dir__() -> list[str]:
    return sorted(__all__)
