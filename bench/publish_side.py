"""One of the two processes of `lowshard bench publish`: reads what to do from stdin, a line of JSON, and answers so.

`python -m lowshard.bench.publish_side giver|taker`. It ends with its stdin.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from lowshard import dtypes
from lowshard.bench import raw_stream
from lowshard.checkpoint.crc import crc32
from lowshard.layout import Layout
from lowshard.mesh import DeviceMesh
from lowshard.placement import Replicated
from lowshard.reshard import Publisher, Subscriber

TENSORS, COLUMNS = 16, 2048
WHOLE, CHANGES = "whole", "changes"
_LIMIT_S = 60.0


def layouts_of(size_bytes: int) -> dict[str, Layout]:
    """Return bf16 weights of about so many bytes, which one rank holds whole."""
    rows = max(1, size_bytes // (2 * COLUMNS * TENSORS))
    layout = Layout(DeviceMesh((1,), ("x",)), (rows, COLUMNS), "bfloat16", (Replicated(),))
    return {f"w{i}": layout for i in range(TENSORS)}


def _arrays(layouts: Mapping[str, Layout]) -> dict[str, np.ndarray]:
    dtype = dtypes.get("bfloat16").numpy
    found = {name: np.empty(layout.local_shape(0), dtype) for name, layout in layouts.items()}
    for array in found.values():
        array.view(np.uint16)[...] = 0x3F80
    return found


def _sums(arrays: Mapping[str, Any]) -> list[int]:
    return [crc32(array.reshape(-1).view(np.uint8).data) for array in arrays.values()]


class Giver:
    """The side that publishes, and sends over bare sockets."""

    def open(self, size_bytes: int, host: str, token: str) -> dict[str, Any]:
        """Make a publisher and a socket that listens; return where they are, and how many bytes a version has."""
        layouts = layouts_of(size_bytes)
        self._arrays = _arrays(layouts)
        self._rng, self._version = np.random.default_rng(1), 0
        self._publisher = Publisher(
            layouts, self._arrays, address=f"tcp://{host}:0", token=bytes.fromhex(token)
        )
        self._listens, port = raw_stream.listening(host)
        size_bytes = sum(array.nbytes for array in self._arrays.values())
        self._memory = np.ones(size_bytes, np.uint8)
        return {"address": self._publisher.address, "port": port, "bytes": size_bytes}

    def accept(self, count: int) -> None:
        """Take so many bare connections."""
        self._sockets = raw_stream.accepted(self._listens, count)

    def publish(self, changed: float) -> int:
        """Flip the lowest bit of about so great a share of the elements, and publish a version; return its number."""
        for array in self._arrays.values():
            flat = array.reshape(-1).view(np.uint16)
            at = np.unique(self._rng.integers(flat.size, size=round(changed * flat.size)))
            flat[at] ^= 1
        self._version += 1
        self._publisher.publish(self._version)
        return self._version

    def send(self, size_bytes: int, hot: bool) -> None:
        """Send so many bytes of memory over the bare connections."""
        raw_stream.send(self._sockets, self._memory[:size_bytes], hot)

    def sums(self) -> list[int]:
        """Return a checksum of each tensor."""
        return _sums(self._arrays)

    def close(self) -> None:
        """End the publisher."""
        self._publisher.close(0.0)


class Taker:
    """The side that subscribes, and receives over bare sockets."""

    def open(self, size_bytes: int, address: str, token: str, host: str, port: int) -> dict[str, Any]:
        """Make two subscribers, one of which takes versions whole, and bare connections; return how many."""
        layouts = layouts_of(size_bytes)
        deltas: dict[str, Literal["auto", "off"]] = {WHOLE: "off", CHANGES: "auto"}
        self._taking = {
            name: Subscriber(
                layouts, _arrays(layouts), address=address, token=bytes.fromhex(token), delta=delta, name=name
            )
            for name, delta in deltas.items()
        }
        size_bytes = sum(array.nbytes for array in _arrays(layouts).values())
        self._sockets = raw_stream.connected(host, port, 1)
        self._memory = np.ones(size_bytes, np.uint8)
        return {"streams": 1}

    def pull(self, which: str) -> dict[str, Any]:
        """Take the version that is offered; return the seconds that took, and the bytes that came."""
        taking = self._taking[which]
        begin_s = time.perf_counter()
        version = taking.pull(_LIMIT_S)
        seconds = time.perf_counter() - begin_s
        return {"version": version, "seconds": seconds, **taking.report()}

    def receive(self, size_bytes: int, hot: bool) -> float:
        """Receive so many bytes over the bare connections; return the seconds that took."""
        return raw_stream.receive(self._sockets, self._memory[:size_bytes], hot)

    def sums(self, which: str) -> list[int]:
        """Return a checksum of each tensor of a subscriber's version."""
        return _sums(self._taking[which].weights)

    def close(self) -> None:
        """End the subscribers."""
        for taking in self._taking.values():
            taking.close()


def main(kind: str) -> None:
    """Do what comes over stdin, until it ends."""
    side = {"giver": Giver, "taker": Taker}[kind]()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no answer
    for line in sys.stdin:
        asked = json.loads(line)
        answer = getattr(side, asked.pop("do"))(**asked)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])
