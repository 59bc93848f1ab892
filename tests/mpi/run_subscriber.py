"""Pulls versions until a file says to stop: FOLDER ADDRESS NAME; notes each, and ends with 3 where one is not whole."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np
from publish_world import communicator, own_rows, serve_layout, token_of

from lowshard.errors import PeerFailed, TimedOut
from lowshard.reshard import Subscriber, digest


def main(folder: Path, address: str, name: str) -> None:
    with communicator() as comm, open(folder / f"{name}.{comm.rank}", "a", buffering=1) as log:
        layout = serve_layout(comm.size)
        out = np.zeros(layout.local_shape(comm.rank), np.int32)
        log.write(f"start {os.getpid()}\n")
        given = {"address": address, "token": token_of(address), "name": name, "share": True}
        with Subscriber({"w": layout}, {"w": out}, comm, **given) as subscriber:
            while True:
                try:
                    said = f"version {subscriber.pull(2)}"
                except TimedOut:
                    said = "late"
                except PeerFailed as error:
                    said = f"gone {error}"
                if subscriber.version is not None:
                    mine = own_rows(subscriber.version, comm.rank, comm.size)
                    if not (subscriber.weights["w"] == mine).all():
                        log.write(
                            f"WRONG {subscriber.version} {sorted(set((subscriber.weights['w'] // 1000).flat))}\n"
                        )
                        sys.exit(3)
                    digest({"w": (layout, subscriber.weights["w"])}, comm)
                log.write(f"{said} {time.time():.3f}\n")
                stop = np.array([(folder / "stop-subscribers").exists()], np.int32)
                comm.broadcast(stop)
                if stop[0]:
                    break


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
