"""Train a torch network with its parameters sharded over the ranks: units are opened and closed by hand.

    lowshard run -n 2 examples/torch_fsdp.py

Each layer is a unit. Its parameters are torch tensors over the engine's buffers, which are good until the unit is
closed: what the backward pass needs of a layer is computed anew from the layer's input, in a graph of that layer alone.

Output of rank 0:

    step  0  loss 0.19
    step 20  loss 0.08
    step 40  loss 0.04
    this rank keeps 640 of 1185 parameters
    the losses of torch alone on the same batches: True
    the saved model gives what the sharded one gives: True
"""

import numpy as np
import torch
from mpi4py import MPI
from torch.func import functional_call

from lowshard import comm as lc
from lowshard.fsdp import FSDP, AdamW, Param

torch.set_num_threads(1)
mse, Tensors = torch.nn.functional.mse_loss, dict[str, torch.Tensor]


class Dense(torch.nn.Linear):
    """A layer with its activation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output."""
        return torch.tanh(super().forward(x))


def build() -> torch.nn.Sequential:
    """Return the model, equal on all ranks."""
    torch.manual_seed(0)
    return torch.nn.Sequential(Dense(2, 32), Dense(32, 32), torch.nn.Linear(32, 1))


def batch(*seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points and the values to learn."""
    x = np.random.default_rng(seed).uniform(-1, 1, (64, 2)).astype(np.float32)
    return torch.from_numpy(x), torch.from_numpy(np.sin(3 * x[:, :1]) * x[:, 1:])


def sharded(model: torch.nn.Module, comm: lc.Communicator) -> FSDP:
    """Return an engine that holds the model's parameters; the model keeps shapes and code, and no values."""
    units = {
        name: [Param(key, tuple(value.shape)) for key, value in layer.named_parameters()]
        for name, layer in model.named_children()
    }
    engine = FSDP(units, comm)
    engine.fill(lambda name, box: model.get_parameter(name).detach()[tuple(slice(*edges) for edges in box)])
    model.to("meta")
    return engine


def opened(engine: FSDP, unit: str, phase: str) -> Tensors:
    """Return a unit's parameters as tensors over its buffer."""
    return {key: torch.from_dlpack(view) for key, view in engine.open(unit, phase).items()}


def forward(engine: FSDP, model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Return the input of each layer, and the output of the last one."""
    found = [x]
    for unit, layer in model.named_children():
        with torch.no_grad():
            found.append(functional_call(layer, opened(engine, unit, "forward"), found[-1]))
        engine.close(unit)
    return found


def backward(engine: FSDP, model: torch.nn.Module, inputs: list[torch.Tensor], dy: torch.Tensor) -> None:
    """Give the engine the gradients of all layers."""
    for unit, layer in reversed(list(model.named_children())):
        params = {key: value.requires_grad_() for key, value in opened(engine, unit, "backward").items()}
        x = inputs.pop().requires_grad_()
        dy, *found = torch.autograd.grad(functional_call(layer, params, x), [x, *params.values()], dy)
        grads = engine.grads(unit, zero=False)
        for key, grad in zip(params, found, strict=True):
            torch.from_dlpack(grads[key]).copy_(grad)
        engine.reduce(unit)
        engine.close(unit)


def trained_alone(ranks: int, steps: int) -> list[float]:
    """Return the losses of torch's own training on the batches of all ranks."""
    model, losses = build(), []
    adam = torch.optim.AdamW(model.parameters(), lr=2e-2, weight_decay=0.0)
    for step in range(steps):
        x, wanted = map(torch.cat, zip(*(batch(step, rank) for rank in range(ranks)), strict=True))
        adam.zero_grad()
        loss = mse(model(x), wanted)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        losses.append(loss.item())
    return losses


with lc.from_mpi(MPI.COMM_WORLD, device="cpu") as comm:
    model = build()
    engine, adam, losses = sharded(model, comm), AdamW(lr=2e-2), []
    for step in range(41):
        x, wanted = batch(step, comm.rank)
        with engine.step():
            *inputs, out = forward(engine, model, x)
            loss = mse(out.requires_grad_(), wanted)
            (dy,) = torch.autograd.grad(loss, out)
            backward(engine, model, inputs, dy)
        engine.join()
        engine.clip(1.0)
        engine.update(adam)
        losses.append(np.mean(MPI.COMM_WORLD.allgather(loss.item())))
        if comm.rank == 0 and step % 20 == 0:
            print(f"step {step:2}  loss {losses[-1]:.2f}")

    given = forward(engine, model, batch(0)[0])[-1]
    state = {name: torch.from_dlpack(engine.full(name)) for name in model.state_dict()}  # every rank calls it
    if comm.rank == 0:
        held = sum(piece.param.size for piece in engine.state().pieces.values())
        print(f"this rank keeps {held} of {sum(value.numel() for value in state.values())} parameters")
        alone = trained_alone(comm.size, len(losses))
        same = np.allclose(losses, alone, rtol=1e-3) and losses[-1] < losses[0] / 2
        print(f"the losses of torch alone on the same batches: {same}")
        plain = build()
        plain.load_state_dict(state)
        with torch.no_grad():
            same = torch.allclose(plain(batch(0)[0]), given, atol=1e-6)
        print(f"the saved model gives what the sharded one gives: {same}")
