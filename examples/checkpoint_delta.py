"""What one checkpoint changes of another as a small file, applied elsewhere: all of it or nothing.

    python examples/checkpoint_delta.py

A trainer writes versions of a model; each is 1 % apart from the one before. A server that has an older one catches up
from the deltas alone. A delta names the version that it stands on by a digest of the content: another base is refused.

Output:

    version 1: ... KB instead of 3408 KB
    version 2: ... KB instead of 3408 KB
    the server was at version 0 and is at version 2 now, 2 deltas applied
    its digest is that of the trainer: True
    refused: a link of the chain is missing
"""

import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np

from lowshard.checkpoint import Catalog, write_delta
from lowshard.errors import CheckpointError
from lowshard.reshard import model_digest
from lowshard.tiling import Tiling
from lowshard.weights import apply_deltas, save

rng = np.random.default_rng(0)
weights = {f"layers.{i}.w": rng.standard_normal((852, 1000)).astype(ml_dtypes.bfloat16) for i in range(2)}
tilings = {name: Tiling.whole(w.shape, "bfloat16") for name, w in weights.items()}

with tempfile.TemporaryDirectory() as folder:
    place = Path(folder)
    (place / "deltas").mkdir()
    for version in range(4):
        if version:  # a step of training: 1 % of the elements move by their last bit
            for w in weights.values():
                bits = w.reshape(-1).view(np.uint16)
                bits[rng.choice(bits.size, bits.size // 100, replace=False)] ^= 1
        save(place / f"trained{version}", {name: (tilings[name], w) for name, w in weights.items()})
        if version:
            before, after = place / f"trained{version - 1}", place / f"trained{version}"
            report = write_delta(before, after, place / "deltas" / f"weight_v{version:06d}.safetensors")
            if version < 3:
                sizes = report.written_bytes // 1000, report.dense_bytes // 1000
                print(f"version {version}: {sizes[0]} KB instead of {sizes[1]} KB")
    save(
        place / "served", {name: (tilings[name], w) for name, w in weights.items()}
    )  # something else, replaced now
    first = [place / "deltas" / f"weight_v{version:06d}.safetensors" for version in (1, 2)]
    done = apply_deltas(place / "trained0", first, place / "served")
    print(f"the server was at version 0 and is at version {done.version} now, {done.applied} deltas applied")
    trained = Catalog.open(place / "trained2").digests
    print(f"its digest is that of the trainer: {done.digest == model_digest(trained or {})}")
    try:
        apply_deltas(
            place / "trained0", [first[0], place / "deltas" / "weight_v000003.safetensors"], place / "served"
        )
    except CheckpointError as error:
        print(
            f"refused: {'a link of the chain is missing' if 'a link of the chain' in str(error) else error}"
        )
