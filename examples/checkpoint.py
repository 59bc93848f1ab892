"""Cut a checkpoint with name patterns, save it in parts, and read it back on other ranks.

    lowshard run -n 4 examples/checkpoint.py

The example makes a small Llama-like checkpoint of its own. Name patterns say how each tensor is sharded ("llama",
"qwen", "moe" and "bert" come along; a path names a file of yours). Each rank reads only its own bytes.

Output of rank 0:

    mlp.up_proj (64, 32): rank 0 holds (16, 32)
    mlp.down_proj (32, 64): rank 0 holds (32, 16)
    self_attn.q_proj (32, 32): rank 0 holds (8, 32)
    input_layernorm (32,): rank 0 holds (32,)
    saved: *.json, *.safetensors
    on two ranks, mlp.up_proj: rank 0 holds (32, 32)
    on one rank: 11 tensors, every element as before: True
"""

import shutil
import tempfile
from pathlib import Path

import numpy as np
from mpi4py import MPI
from safetensors.numpy import load_file, save_file

from lowshard import comm as lc
from lowshard.checkpoint import Catalog
from lowshard.weights import NamePatterns, Sizes, load, load_sharded, nodes_of, plan_load, save

world = MPI.COMM_WORLD
folder = Path(world.bcast(tempfile.mkdtemp(prefix="lowshard-example-") if world.rank == 0 else None))
source, parts = folder / "model.safetensors", folder / "parts"


def make_checkpoint() -> None:
    """Write one layer of a model with 4 heads of 8."""
    rng = np.random.default_rng(0)
    shapes = {"embed_tokens": (96, 32), "norm": (32,)}
    layer = {
        "self_attn.q_proj": (32, 32),
        "self_attn.k_proj": (32, 32),
        "self_attn.v_proj": (32, 32),
        "self_attn.o_proj": (32, 32),
        "mlp.gate_proj": (64, 32),
        "mlp.up_proj": (64, 32),
        "mlp.down_proj": (32, 64),
        "input_layernorm": (32,),
        "post_attention_layernorm": (32,),
    }
    shapes |= {f"layers.0.{name}": shape for name, shape in layer.items()}
    tensors = {f"model.{n}.weight": rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    save_file(tensors, source)


if world.rank == 0:
    make_checkpoint()
world.Barrier()

with lc.from_mpi(world, device="cpu") as comm:
    catalog = Catalog.open(source)  # a file, a Hugging Face folder, or what `save` wrote
    shapes = {name: tensor.shape for name, tensor in catalog.tensors.items()}
    strategies = NamePatterns.load("llama").strategies(shapes, comm.size, Sizes(num_heads=4))
    tilings = {name: strategies[name].layout(shapes[name], t.dtype) for name, t in catalog.tensors.items()}
    local = load(catalog, plan_load(catalog, tilings, nodes=nodes_of(comm)), comm)
    save(parts, {name: (tilings[name], local[name]) for name in local}, comm, strategies=strategies)

    if comm.rank == 0:
        for part in ("mlp.up_proj", "mlp.down_proj", "self_attn.q_proj", "input_layernorm"):
            name = f"model.layers.0.{part}.weight"
            print(f"{part} {shapes[name]}: rank 0 holds {local[name].shape}")
        print(f"saved: {', '.join(sorted({'*' + file.suffix for file in parts.iterdir()}))}")

    # Any number of ranks may read it, and needs no patterns: here two of them, then each alone.
    pair = comm.split(0 if comm.rank < 2 else None)
    if pair is not None:
        held = load_sharded(parts, pair)
        if pair.rank == 0:
            print(
                f"on two ranks, mlp.up_proj: rank 0 holds {held['model.layers.0.mlp.up_proj.weight'].shape}"
            )
        pair.close()
    whole, original = load_sharded(parts), load_file(source)
    same = all(np.array_equal(whole[name], original[name]) for name in original)
    if comm.rank == 0:
        print(f"on one rank: {len(whole)} tensors, every element as before: {same}")
    comm.barrier()  # nobody reads any more
    if comm.rank == 0:
        shutil.rmtree(folder)
