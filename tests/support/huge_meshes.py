"""Picks how every op runs on meshes of the most ranks there can be, within 2 s and 256 MB each.

Run as a program of its own: `python -m support.huge_meshes`.
"""

from __future__ import annotations

import resource
import time
from pathlib import Path

import numpy as np
from support.op_samples import SAMPLES

from lowshard import DeviceMesh, Layout, Replicated, Sharded
from lowshard.errors import LowshardError
from lowshard.mesh import MOST_RANKS
from lowshard.solver import pick

MOST_BYTES, MOST_S = 256 << 20, 2.0
MESHES = (((MOST_RANKS,), ("dp",)), ((2, 1 << 29), ("dp", "tp")), ((1 << 17, 2), ("dp", "tp")))


def main() -> None:
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + MOST_BYTES,) * 2)
    offered = refused = 0
    for op in sorted(SAMPLES):
        arrays, args = SAMPLES[op](np.random.default_rng(1))
        for shape, names in MESHES:
            mesh = DeviceMesh(shape, names)
            for cut in range(-1, max(x.ndim for x in arrays)):
                for rules in ("documented", "extended"):
                    layouts = [
                        Layout(
                            mesh,
                            x.shape,
                            x.dtype,
                            [Sharded(cut) if 0 <= cut < x.ndim else Replicated()] * len(shape),
                        )
                        for x in arrays
                    ]
                    begin_s = time.perf_counter()
                    try:
                        pick(op, layouts, rules=rules, **args)
                        offered += 1
                    except LowshardError:
                        refused += 1
                    took_s = time.perf_counter() - begin_s
                    assert took_s < MOST_S, f"{op} on {mesh}, dim {cut} cut, {rules}: {took_s:.1f} s"
    print(f"{offered} offered, {refused} refused")


if __name__ == "__main__":
    main()
