"""JAX on as many virtual host devices of one process: `python -m lowshard.bench.rival_jax REQUEST`.

The transition is a jitted function with the wanted sharding of its result, for which XLA chooses the collectives. JAX
arrays have no terms: those of P are an extra leading dim, summed. There is no border between processes to cross. The
floor runs on a thread a device.
"""

from __future__ import annotations

import json
import math
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from lowshard.bench.bench_transition import Transition, floor_of, transitions
from lowshard.settings import change


def main() -> int:
    """Measure and print."""
    request = json.loads(sys.argv[1])
    ranks = request["ranks"]
    change("XLA_FLAGS", f"--xla_force_host_platform_device_count={ranks}")
    change("JAX_PLATFORMS", "cpu")
    with ThreadPoolExecutor(ranks) as threads:
        for size_bytes in request["sizes"]:
            for transition in transitions(request["names"], ranks, size_bytes):
                print(json.dumps(_measure(transition, request["rounds"], threads)), flush=True)
    return 0


def _measure(transition: Transition, rounds: int, threads: ThreadPoolExecutor) -> dict[str, Any]:
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    ranks, side = math.prod(transition.grid), transition.side
    names = ("x", "y", "z")[: len(transition.grid)]
    mesh = Mesh(np.array(jax.devices()[:ranks]).reshape(transition.grid), names)
    before, after = transition.placements

    def cut(words: tuple[str, ...]) -> list[Any]:
        dims: list[list[str]] = [[], []]
        for name, word in zip(names, words, strict=True):
            if word.startswith("S"):
                dims[int(word[1:])].append(name)
        return [tuple(axes) or None for axes in dims]

    out = NamedSharding(mesh, PartitionSpec(*cut(after)))
    value = transition.value(((0, side), (0, side)))
    partial = tuple(name for name, word in zip(names, before, strict=True) if word == "P")
    if partial:
        source = NamedSharding(mesh, PartitionSpec(partial, *cut(before)))
        whole = np.broadcast_to(value, (transition.terms, side, side))
        move = jax.jit(lambda x: x.sum(0), out_shardings=out)
    else:
        source, whole = NamedSharding(mesh, PartitionSpec(*cut(before))), value
        move = jax.jit(lambda x: x, out_shardings=out)
    # A new source each time: a result may else be the source itself.
    made = move(jax.device_put(whole, source))
    wrong = int(np.count_nonzero(np.asarray(made) != value * np.float32(transition.terms)))
    elems = transition.dst.local_elems(0)
    floors = [floor_of(transition, elems) for _ in range(ranks)]
    pairs = []
    for _ in range(rounds):
        given = jax.block_until_ready(jax.device_put(whole, source))
        begin_s = time.perf_counter()
        jax.block_until_ready(move(given))
        middle_s = time.perf_counter()
        list(threads.map(lambda floor: floor(), floors))
        pairs.append((middle_s - begin_s, time.perf_counter() - middle_s))
    return {
        "wrong": wrong, "version": jax.__version__,
        "seconds": [own for own, _ in pairs], "floor_s": [least for _, least in pairs],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
