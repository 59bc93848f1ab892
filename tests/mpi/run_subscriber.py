"""Pulls versions until a file says to stop: FOLDER ADDRESS NAME; notes each, and ends with 3 where one is not whole."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from publish_world import communicator, own_rows, serve_layout, token_of

from lowshard import dtypes
from lowshard.errors import PeerFailed, TimedOut
from lowshard.kernels import MXFP8Tensor, quantize_mxfp8
from lowshard.reshard import MXFP8ReshardTransform, Subscriber, digest


def is_whole(weights: Any, version: int, layout: Any, comm: Any) -> bool:
    """Say whether what is served is all of one version."""
    mine = own_rows(version, comm.rank, comm.size)
    if "q" in weights:
        wanted = quantize_mxfp8(mine.astype(dtypes.get("bfloat16").numpy))  # to which it rounds first
        held = weights["q"]
        return bool((held.data == wanted.data).all() and (held.scale == wanted.scale).all())
    digest({"w": (layout, weights["w"])}, comm)
    return bool((weights["w"] == mine).all())


def main(folder: Path, address: str, name: str) -> None:
    """Subscribe; who is called mxfp8 to a tensor that it quantises, and others to one as it is."""
    with communicator() as comm, open(folder / f"{name}.{comm.rank}", "a", buffering=1) as log:
        layout = serve_layout(comm.size, "float32" if name == "mxfp8" else "int32")
        rows, cols = layout.local_shape(comm.rank)
        log.write(f"start {os.getpid()}\n")
        given: dict[str, Any] = {"address": address, "token": token_of(address), "name": name}
        if name == "mxfp8":
            room = MXFP8Tensor(np.zeros((rows, cols), np.uint8), np.zeros((rows, cols // 32), np.uint8))
            made = Subscriber(
                {"q": layout}, {}, comm, transform=MXFP8ReshardTransform(["q"], {"q": room}), **given
            )
        else:
            made = Subscriber({"w": layout}, {"w": np.zeros((rows, cols), np.int32)}, comm, **given)
        with made as subscriber:
            while True:
                try:
                    said = f"version {subscriber.pull(2)}"
                except TimedOut:
                    said = "late"
                except PeerFailed as error:
                    said = f"gone {error}"
                served = subscriber.version
                if served is not None and not is_whole(subscriber.weights, served, layout, comm):
                    log.write(f"WRONG {served}\n")
                    sys.exit(3)
                log.write(f"{said} {time.time():.3f}\n")
                stop = np.array([(folder / "stop-subscribers").exists()], np.int32)
                comm.broadcast(stop)
                if stop[0]:
                    break


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
