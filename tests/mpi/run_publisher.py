"""Publishes versions until a file says to stop: FOLDER ADDRESS FIRST PAUSE_S."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
from publish_world import communicator, own_columns, token_of, train_layouts

from lowshard.reshard import Publisher


def main(folder: Path, address: str, first: int, pause_s: float) -> None:
    with communicator() as comm:
        layouts = train_layouts(comm.size)
        arrays = {n: np.zeros(x.local_shape(comm.rank), x.dtype) for n, x in layouts.items()}
        with Publisher(layouts, arrays, comm, address=address, token=token_of(address)) as publisher:
            version = first
            while True:
                for array in arrays.values():
                    array[...] = own_columns(version, comm.rank, comm.size)
                publisher.publish(version)
                if comm.rank == 0:
                    (folder / "published.new").write_text(str(version))  # whoever reads finds a whole number
                    (folder / "published.new").replace(folder / "published")
                stop = np.array([(folder / "stop").exists()], np.int32)
                comm.broadcast(stop)
                if stop[0]:
                    break
                version += 1
                time.sleep(pause_s)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
