"""Publish and subscribe: a trainer and a server that are two jobs, started apart.

    python examples/publish.py

That starts both. In two terminals, in either order:

    python examples/publish.py serve unix:/tmp/refit
    python examples/publish.py train unix:/tmp/refit

The trainer offers versions of its weights at an address. The server, another program without MPI, connects when it
likes, takes the newest version whole, and serves the old one until then. Either may be killed and started again. Any
process that knows the address and may read the token can be a server. A job of several ranks passes its communicator,
and says in layouts what each rank holds.

Output of both:

    server: version 1, 0.1 to 0.1
    server: version 2, 0.2 to 0.2
    server: version 3, 0.3 to 0.3
    trainer: members had {'server': 3}
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
    """Publish three versions."""
    weights = {"fc1": np.zeros((1024, 512), np.float32)}
    with Publisher(layouts, weights, address=address) as publisher:
        for version in (1, 2, 3):
            weights["fc1"] += np.float32(0.1)  # a training step
            publisher.publish(version)  # returns when `weights` may change; waits for no server
            while [member.version for member in publisher.members()] != [version]:
                time.sleep(0.01)  # only so that the server sees each version
        had = {member.name: member.version for member in publisher.members()}
    print(f"trainer: members had {had}")


def serve(address: str) -> None:
    """Take versions as they come, up to the third."""
    out = {"fc1": np.zeros((1024, 512), np.float32)}
    with Subscriber(layouts, out, address=address, name="server") as subscriber:
        while subscriber.version != 3:
            version = subscriber.pull(timeout_s=30)
            weight = subscriber.weights["fc1"]  # ask again after each pull
            print(f"server: version {version}, {weight.min():.1f} to {weight.max():.1f}", flush=True)
        time.sleep(0.2)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        {"train": train, "serve": serve}[sys.argv[1]](sys.argv[2])
    else:
        with tempfile.TemporaryDirectory() as folder:
            address = f"unix:{folder}/refit"
            server = subprocess.Popen([sys.executable, __file__, "serve", address])
            train(address)
            server.wait()
