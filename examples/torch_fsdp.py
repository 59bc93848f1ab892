"""Train an unmodified torch module with its parameters sharded over the ranks.

    lowshard run -n 2 examples/torch_fsdp.py

`ShardedModule` opens, closes and reduces units around autograd. Gradients and the optimizer's state are in its engine:
the engine clips and updates, in place of `clip_grad_norm_` and `optimizer.step()`. The state dict is the module's: all
ranks ask for it, one saves it, and a module without shards loads it.

Output of rank 0:

    step  0  loss 0.19
    step 20  loss 0.08
    step 40  loss 0.04
    this rank keeps 640 of 1185 parameters
    the saved model gives what the sharded one gives: True
"""

import io

import numpy as np
import torch
from mpi4py import MPI

from lowshard import comm as lc
from lowshard.fsdp import AdamW
from lowshard.fsdp.torch import ShardedModule

torch.set_num_threads(1)


def build() -> torch.nn.Module:
    """Return the model, equal on all ranks."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
    )  # fmt: skip


def batch(*seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points and the values to learn."""
    x = np.random.default_rng(seed).uniform(-1, 1, (64, 2)).astype(np.float32)
    return torch.from_numpy(x), torch.from_numpy(np.sin(3 * x[:, :1]) * x[:, 1:])


with lc.from_mpi(MPI.COMM_WORLD, device="cpu") as comm:
    model = build()
    sharded = ShardedModule(model, comm)
    adam = AdamW(lr=2e-2)
    for step in range(41):
        x, wanted = batch(step, comm.rank)
        with sharded.step():
            loss = torch.nn.functional.mse_loss(model(x), wanted)
            loss.backward()
        sharded.engine.join()
        sharded.engine.clip(1.0)
        sharded.engine.update(adam)
        sharded.engine.broadcast_updated_params()
        losses = MPI.COMM_WORLD.gather(float(loss.detach()))
        if losses and step % 20 == 0:
            print(f"step {step:2}  loss {np.mean(losses):.2f}")

    state = sharded.state_dict()  # whole tensors; every rank calls this
    with torch.no_grad():
        given = model(batch(0)[0])
    if comm.rank == 0:
        held = sum(piece.param.size for piece in sharded.engine.state().pieces.values())
        print(f"this rank keeps {held} of {sum(value.numel() for value in state.values())} parameters")
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        plain = build()
        plain.load_state_dict(torch.load(file))
        with torch.no_grad():
            same = torch.allclose(plain(batch(0)[0]), given, atol=1e-6)
        print(f"the saved model gives what the sharded one gives: {same}")
