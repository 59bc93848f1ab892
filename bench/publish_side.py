"""One of the two processes of `lowshard bench publish`: reads what to do from stdin, a line of JSON, and answers so.

`python -m lowshard.bench.publish_side giver|taker`. It ends with its stdin. What versions are compared with are the
same bytes over a bare socket: from memory to memory, no checksum; the side that receives says when, by a byte.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from lowshard import dtypes
from lowshard.checkpoint.crc import crc32
from lowshard.layout import Layout
from lowshard.mesh import DeviceMesh
from lowshard.placement import Replicated
from lowshard.reshard import Publisher, Subscriber

HOST = "127.0.0.1"
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
    """The side that publishes, and sends over a bare socket."""

    def open(self, size_bytes: int, token: str) -> dict[str, Any]:
        """Make a publisher and a socket that listens; return where they are, and how many bytes a version has."""
        layouts = layouts_of(size_bytes)
        self._arrays = _arrays(layouts)
        self._rng, self._version = np.random.default_rng(1), 0
        self._publisher = Publisher(
            layouts, self._arrays, address=f"tcp://{HOST}:0", token=bytes.fromhex(token)
        )
        self._listens = socket.create_server((HOST, 0))
        total = sum(array.nbytes for array in self._arrays.values())
        self._memory = np.ones(total, np.uint8)
        return {
            "address": self._publisher.address,
            "port": self._listens.getsockname()[1],
            "bytes": total,
        }

    def accept(self) -> None:
        """Take the bare connection."""
        self._socket, _ = self._listens.accept()

    def publish(self, changed: float) -> int:
        """Flip the lowest bit of about so great a share of the elements, and publish a version; return its number."""
        for array in self._arrays.values():
            flat = array.reshape(-1).view(np.uint16)
            at = np.unique(self._rng.integers(flat.size, size=round(changed * flat.size)))
            flat[at] ^= 1
        self._version += 1
        self._publisher.publish(self._version)
        return self._version

    def send(self, size_bytes: int) -> None:
        """Send so many bytes over the bare connection, once the other side asks for them."""
        self._socket.recv(1)
        self._socket.sendall(self._memory[:size_bytes].data)

    def sums(self) -> list[int]:
        """Return a checksum of each tensor."""
        return _sums(self._arrays)

    def close(self) -> None:
        """End the publisher."""
        self._publisher.close(0.0)


class Taker:
    """The side that subscribes, and receives over a bare socket."""

    def open(self, size_bytes: int, address: str, token: str, port: int) -> None:
        """Make two subscribers, one of which takes versions whole, and the bare connection."""
        layouts = layouts_of(size_bytes)
        deltas: dict[str, Literal["auto", "off"]] = {WHOLE: "off", CHANGES: "auto"}
        self._taking = {
            name: Subscriber(
                layouts, _arrays(layouts), address=address, token=bytes.fromhex(token), delta=delta, name=name
            )
            for name, delta in deltas.items()
        }
        self._socket = socket.create_connection((HOST, port))
        self._memory = np.ones(sum(array.nbytes for array in _arrays(layouts).values()), np.uint8)

    def pull(self, which: str) -> dict[str, Any]:
        """Take the version that is offered; return the seconds that took, and the bytes that came."""
        taking = self._taking[which]
        begin_s = time.perf_counter()
        version = taking.pull(_LIMIT_S)
        seconds = time.perf_counter() - begin_s
        return {"version": version, "seconds": seconds, **taking.report()}

    def receive(self, size_bytes: int) -> float:
        """Receive so many bytes over the bare connection; return the seconds that took."""
        begin_s, got = time.perf_counter(), 0
        self._socket.sendall(b"x")
        while got < size_bytes:
            count = self._socket.recv_into(self._memory[got:size_bytes].data, 0, socket.MSG_WAITALL)
            if not count:
                raise ConnectionError("the other side has gone")
            got += count
        return time.perf_counter() - begin_s

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
