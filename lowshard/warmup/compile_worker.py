"""A process that compiles one group of functions: `python -m lowshard.warmup.compile_worker GROUP [LEVEL]`.

It says on stdout which functions it has, a line each, as they come. A process compiles for one level.
"""

from __future__ import annotations

import sys

from lowshard import compiled
from lowshard.compiled.cache import compile_for
from lowshard.compiled.shipped import LEVELS
from lowshard.warmup.function_list import function_groups


def main(group: str, level_name: str | None = None) -> None:
    """Compile a group for this processor's level, or for another."""
    if level_name is not None:
        compile_for(next(level for level in LEVELS if level.name == level_name))
    told: set[str] = set()
    for load in function_groups()[group]:
        load()
        for name, origin in compiled.origins.items():
            if name not in told:
                print(origin, name, flush=True)
        told = set(compiled.origins)


if __name__ == "__main__":
    main(*sys.argv[1:])
