"""A ShardedModule beside torch's FSDP2 on the same ranks: run by test_beside_fsdp2.py."""

from __future__ import annotations

import io
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support import gloo

from lowshard import comm as lc
from lowshard.errors import MeshError
from lowshard.fsdp import SGD, AdamW, ShardingStrategy
from lowshard.fsdp.torch import ShardedModule
from lowshard.interop import torch as lt


class Net(torch.nn.Module):
    """With a tie, a frozen bias, buffers, and fewer rows than ranks; FSDP2 takes no scalar."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(29, 37)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(37, 37) for _ in range(2)])
        self.norm = torch.nn.LayerNorm(37)
        self.few = torch.nn.Linear(37, 1)
        self.head = torch.nn.Linear(37, 29)
        self.head.weight = self.embed.weight
        self.blocks[0].bias.requires_grad_(False)
        self.register_buffer("counts", torch.arange(3.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(self.norm(x)) * (1 + torch.tanh(self.few(x)))


def loss_of(net: Any, step: int, rank: int) -> torch.Tensor:
    rng = np.random.default_rng([step, rank])
    tokens, targets = (torch.from_numpy(rng.integers(0, 29, 12)) for _ in range(2))
    return torch.nn.functional.cross_entropy(net(tokens), targets)


def theirs_of(seed: int, sizes: tuple[int, ...]) -> Any:
    names = ("replicate", "shard") if len(sizes) == 2 else None
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    net = Net(seed)
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert list(ours) == list(theirs), (list(ours), list(theirs))
    for name, wanted in theirs.items():
        found = ours[name]
        assert isinstance(found, DTensor) == isinstance(wanted, DTensor), name
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), name
        if isinstance(found, DTensor):
            assert found.placements == wanted.placements, (name, found.placements, wanted.placements)
            layout = lt.layout(found)
            assert layout.local_shape(dist.get_rank()) == tuple(found.to_local().shape)
            found, wanted = found.to_local(), wanted.to_local()
        assert torch.equal(found, wanted), name


def check_states(comm: lc.Communicator, strategy: ShardingStrategy, sizes: tuple[int, ...]) -> None:
    sharded, theirs = ShardedModule(Net(3), comm, strategy), theirs_of(3, sizes)
    mesh = theirs.embed.weight.device_mesh
    same(sharded.state_dict(StateDictOptions(), device_mesh=mesh), theirs.state_dict())
    with pytest.raises(MeshError, match="in order"):
        sharded.state_dict(StateDictOptions(), device_mesh=init_device_mesh("cpu", (1, 1, comm.size)))
    for options in (
        StateDictOptions(),
        StateDictOptions(cpu_offload=True),
        StateDictOptions(full_state_dict=True),
        StateDictOptions(full_state_dict=True, cpu_offload=True),
        StateDictOptions(ignore_frozen_params=True),
    ):
        same(sharded.state_dict(options), get_model_state_dict(theirs, options=options))
    other = theirs_of(5, sizes)
    keys = sharded.load_state_dict(other.state_dict())  # DTensors in
    assert (keys.missing_keys, keys.unexpected_keys) == ([], [])
    same(sharded.state_dict(), Net(5).state_dict())
    theirs.load_state_dict(sharded.state_dict(StateDictOptions()))  # and ours into FSDP2
    same(get_model_state_dict(theirs, options=StateDictOptions(full_state_dict=True)), Net(5).state_dict())
    whole = Net(7).state_dict() if comm.rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(theirs, dict(whole), options=options)
    sharded.load_state_dict(whole, options=options)
    same(sharded.state_dict(StateDictOptions()), theirs.state_dict())
    file = io.BytesIO()
    torch.save(sharded.state_dict(StateDictOptions()), file)
    file.seek(0)
    same(torch.load(file, weights_only=False), theirs.state_dict())


def check_training(comm: lc.Communicator, strategy: ShardingStrategy, sizes: tuple[int, ...]) -> None:
    for name in ("adamw", "sgd"):
        sharded, theirs = ShardedModule(Net(3), comm, strategy), theirs_of(3, sizes)
        trained = [p for p in theirs.parameters() if p.requires_grad]
        if name == "adamw":
            rule: Any = AdamW(lr=1e-2, weight_decay=0.1)
            their_rule: Any = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)
        else:
            rule, their_rule = SGD(lr=0.1, momentum=0.9), torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        for step in range(4):
            with sharded.step():
                ours = loss_of(sharded, step, comm.rank)
                ours.backward()
            sharded.engine.join()
            norm = sharded.engine.clip(0.3)
            sharded.engine.update(rule)
            sharded.engine.broadcast_updated_params()
            their_rule.zero_grad()
            loss = loss_of(theirs, step, comm.rank)
            loss.backward()
            their_norm = torch.nn.utils.clip_grad_norm_(trained, 0.3)
            their_norm = their_norm.full_tensor() if isinstance(their_norm, DTensor) else their_norm
            their_rule.step()
            assert abs(norm - float(their_norm)) <= 1e-5 * norm, (step, norm, their_norm)
            assert abs(float(ours) - float(loss)) <= 1e-5 * abs(float(loss))
        wanted = get_model_state_dict(theirs, options=StateDictOptions(full_state_dict=True))
        for key, value in sharded.state_dict().items():
            torch.testing.assert_close(value, wanted[key], rtol=2e-5, atol=2e-6, msg=f"{name} {key}")


def main() -> None:
    warnings.simplefilter("ignore")
    with lc.from_mpi(MPI.COMM_WORLD, device="cpu") as comm:
        gloo.join(sys.argv[1], comm.rank, comm.size)
        check_states(comm, ShardingStrategy.FullShard, (comm.size,))
        check_training(comm, ShardingStrategy.FullShard, (comm.size,))
        if comm.size == 4:
            check_states(comm, ShardingStrategy.HybridShard(intra_node_size=2), (2, 2))
            check_training(comm, ShardingStrategy.HybridShard(intra_node_size=2), (2, 2))
        dist.destroy_process_group()
        if comm.rank == 0:
            print(f"as FSDP2 on {comm.size} ranks")


if __name__ == "__main__":
    main()
