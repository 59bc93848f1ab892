"""Publish and subscribe: a trainer and a server that are two jobs, started apart.

    python examples/publish.py

The trainer offers versions of its weights at an address. The server, another program without MPI, connects when it
likes, takes the newest version whole, and serves the old one until then. Either may be killed and started again. Here
the trainer starts the server, so that one command shows both; any process that knows the address and may read the token
can be one. A job of several ranks passes its communicator, and says in layouts what each rank holds.

Output of both:

    trainer: version 1 is out
    server: version 1, 0.1 to 0.1
    trainer: version 2 is out
    server: version 2, 0.2 to 0.2
    trainer: version 3 is out
    server: version 3, 0.3 to 0.3
    trainer: {'server': 3} when it ends
"""

import subprocess
import sys
import tempfile
import time

import numpy as np

import lowshard as ls
from lowshard.reshard import Publisher, Subscriber

alone = ls.DeviceMesh((1,), ("tp",))
layouts = {"fc1": ls.Layout(alone, (1024, 512), "float32", (ls.Replicated(),))}


def train(address: str) -> None:
    weights = {"fc1": np.zeros((1024, 512), np.float32)}
    server = subprocess.Popen([sys.executable, __file__, address])
    with Publisher(layouts, weights, address=address) as publisher:
        for version in (1, 2, 3):
            weights["fc1"] += np.float32(0.1)  # a training step
            print(f"trainer: version {version} is out", flush=True)
            publisher.publish(version)  # returns when `weights` may change; waits for no server
            while [member.version for member in publisher.members()] != [version]:
                time.sleep(0.01)  # only so that this example prints the same each time
        print(f"trainer: {({m.name: m.version for m in publisher.members()})} when it ends", flush=True)
    server.wait()


def serve(address: str) -> None:
    out = {"fc1": np.zeros((1024, 512), np.float32)}
    with Subscriber(layouts, out, address=address, name="server") as subscriber:
        while subscriber.version != 3:
            version = subscriber.pull(timeout_s=30)
            weight = subscriber.weights["fc1"]  # ask again after each pull
            print(f"server: version {version}, {weight.min():.1f} to {weight.max():.1f}", flush=True)
        time.sleep(0.2)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        serve(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            train(f"unix:{folder}/refit")
