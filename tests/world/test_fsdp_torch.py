"""An unmodified nn.Module on sharded ranks trains as it does alone, and views pass to torch without a copy."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import numpy as np
import pytest
from support import fsdp_kit as kit

from lowshard import comm as lc
from lowshard import errors
from lowshard.fsdp import FSDP, SGD, AdamW, Param, ShardingStrategy

torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")

from lowshard.fsdp.torch import ShardedModule  # noqa: E402


class Block(torch.nn.Module):  # type: ignore[misc,name-defined]
    def __init__(self, n: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(n)
        self.up, self.down = torch.nn.Linear(n, 53), torch.nn.Linear(53, n)

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(torch.nn.Module):  # type: ignore[misc,name-defined]
    """With an embedding that the head is tied to, a frozen bias, and a scale of the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(29, 37)
        self.blocks = torch.nn.ModuleList([Block(37) for _ in range(3)])
        self.head = torch.nn.Linear(37, 29)
        self.head.weight = self.embed.weight
        self.blocks[1].up.bias.requires_grad_(False)
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


_SEEDING = threading.Lock()


def made() -> Any:
    with _SEEDING:  # torch's generator is one for all threads
        torch.manual_seed(3)
        return Net()


def loss_of(net: Any, step: int, micro: int) -> Any:
    rng = np.random.default_rng([step, micro])
    tokens, targets = (torch.from_numpy(rng.integers(0, 29, 12)) for _ in range(2))
    return torch.nn.functional.cross_entropy(net(tokens), targets)


def alone(steps: int, micro_batches: int) -> dict[str, np.ndarray]:
    """Train in one process: gradients of micro-batches one by one, added in a tree; torch's own AdamW."""
    net = made()
    rule = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(steps):
        leaves = []
        for micro in range(micro_batches):
            net.zero_grad(set_to_none=True)
            loss_of(net, step, micro).backward()
            leaves.append({n: p.grad.numpy().copy() for n, p in net.named_parameters() if p.grad is not None})
        for name, param in net.named_parameters():
            if name in leaves[0]:
                total = kit.tree([leaf[name] for leaf in leaves]) / np.float32(micro_batches)
                param.grad = torch.from_numpy(np.asarray(total))
        rule.step()
    return {name: param.detach().numpy() for name, param in net.named_parameters()}


@pytest.mark.parametrize(
    ("world", "name"), [(1, "none"), (2, "full"), (4, "full"), (2, "sgo"), (4, "hybrid2")]
)
def test_an_unmodified_module_trains_as_alone(world: int, name: str) -> None:
    torch.set_num_threads(1)
    wanted = alone(4, 4)

    def train(comm: lc.Communicator) -> dict[str, np.ndarray]:
        net = made()
        sharded = ShardedModule(net, comm, kit.STRATEGIES[name])
        rule, each = AdamW(lr=1e-2, weight_decay=0.1), 4 // comm.size
        for step in range(4):
            for k in range(each):
                with sharded.step(last=k == each - 1):
                    loss_of(net, step, comm.rank * each + k).backward()
            sharded.engine.join()
            sharded.engine.update(rule)
            sharded.engine.broadcast_updated_params()
        assert all(param.grad is None for param in net.parameters())
        if name == "full" and comm.size > 1:
            assert all(param.numel() == 0 for param in net.parameters())  # nothing is held but shards
        found = dict(sharded.full_state())
        sharded.engine.shut()
        return found

    for found in lc.run_loopback(world, train, 60):
        assert set(found) == set(wanted)
        for key, value in wanted.items():
            np.testing.assert_allclose(found[key], value, rtol=1e-5, atol=2e-6, err_msg=key)


def test_shardings_of_a_module_agree_bit_for_bit() -> None:
    torch.set_num_threads(1)

    def train(comm: lc.Communicator, strategy: ShardingStrategy) -> bytes:
        net = made()
        sharded = ShardedModule(net, comm, strategy)
        for step in range(3):
            with sharded.step():
                loss_of(net, step, comm.rank).backward()
            sharded.engine.join()
            sharded.engine.clip(0.5)
            sharded.engine.update(AdamW(lr=1e-2))
            sharded.engine.broadcast_updated_params()
        return b"".join(value.tobytes() for value in sharded.full_state().values())

    names = [name for name in kit.STRATEGIES if name != "hybrid4"]
    found = [lc.run_loopback(2, lambda c, n=name: train(c, kit.STRATEGIES[n]), 60) for name in names]
    assert len({data for datas in found for data in datas}) == 1


def test_views_go_to_torch_and_back_without_a_copy() -> None:
    def look(comm: lc.Communicator) -> None:
        with FSDP({"u": [Param("w", (5, 7))]}, comm) as engine:
            engine.fill(lambda name, box: 2.0)
            w = torch.from_dlpack(engine.open("u", "backward")["w"])
            assert w.data_ptr() == engine.open("u")["w"].ctypes.data
            assert (w == 2).all()
            torch.from_dlpack(engine.grads("u")["w"])[...] = 3
            engine.add_grad("u", "w", np.from_dlpack(torch.ones(5, 7)))
            engine.reduce("u")
            engine.close("u")
            engine.close("u")
            engine.join()
            assert engine.norm(float("inf")) == 4

    lc.run_loopback(2, look, 20)


class Odd(torch.nn.Module):  # type: ignore[misc,name-defined]
    """With a child whose name is that of the unit of what is left, and a module at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.root = torch.nn.Linear(8, 8)
        self.blocks = torch.nn.ModuleList([torch.nn.Sequential(self.root, torch.nn.Linear(8, 8)), self.root])
        self.scale = torch.nn.Parameter(torch.ones(8))

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x) * self.scale
        return x.square().sum()


@pytest.mark.parametrize("units", ["by default", "within each other", "twice"])
def test_units_of_any_name_within_each_other_and_at_two_places_train_as_alone(units: str) -> None:
    """A name that stood twice took the place of the other one's parameters, and gradients were lost."""
    torch.set_num_threads(1)

    def odd() -> Any:
        with _SEEDING:
            torch.manual_seed(3)
            return Odd()

    net = odd()
    rule = torch.optim.SGD(net.parameters(), lr=1e-2)
    for _ in range(2):
        rule.zero_grad()
        net(torch.ones(3, 8)).backward()
        rule.step()

    def train(comm: lc.Communicator) -> dict[str, np.ndarray]:
        net = odd()
        inner = net.blocks[0][1]
        given = {
            "by default": None,
            "within each other": [inner, net.blocks[0]],
            "twice": [net.root, inner, net.root],
        }
        sharded = ShardedModule(net, comm, units=given[units])
        for _ in range(2):
            with sharded.step():
                net(torch.ones(3, 8)).backward()
            sharded.engine.join()
            sharded.engine.update(SGD(lr=1e-2))
        return dict(sharded.full_state())

    for found in lc.run_loopback(2, train, 20):
        for key, value in net.named_parameters():
            np.testing.assert_allclose(found[key], value.detach().numpy(), rtol=1e-5, atol=1e-6, err_msg=key)


class Scaled(torch.nn.Module):  # type: ignore[misc,name-defined]
    """Its weight is another module's too; its scale is used before it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((8,), 2.0))
        self.weight = torch.nn.Parameter(torch.eye(8))

    def forward(self, x: Any) -> Any:
        return (x * self.scale) @ self.weight


def test_a_gradient_that_arrives_after_that_of_what_the_unit_is_tied_to() -> None:
    """The tied unit was taken for reduced twice."""

    def train(comm: lc.Communicator) -> list[float]:
        net = torch.nn.ModuleDict({"head": torch.nn.Linear(8, 8, bias=False), "embed": Scaled()})
        net["head"].weight = net["embed"].weight
        sharded = ShardedModule(net, comm)
        with sharded.step():
            net["head"](net["embed"](torch.ones(1, 8))).sum().backward()
        sharded.engine.join()
        sharded.engine.update(SGD(lr=1.0))
        return [float(value) for tensor in sharded.full_state().values() for value in np.unique(tensor)]

    weight, scale = np.eye(8) - 4, 1.0  # of two uses 2 each, and of 8 elements 1 each
    assert lc.run_loopback(2, train, 20) == [[*np.unique(weight), scale]] * 2


def test_a_module_in_another_sharded_module_and_the_module_itself_are_no_units() -> None:
    def make(comm: lc.Communicator) -> None:
        net = made()
        with pytest.raises(errors.LayoutError, match="units are submodules"):
            ShardedModule(net, comm, units=[net])
        ShardedModule(net, comm)
        with pytest.raises(errors.LayoutError, match="is in another ShardedModule"):
            ShardedModule(net, comm)

    lc.run_loopback(1, make, 20)


@pytest.mark.parametrize("trains", [False, True])
def test_a_parameter_that_is_frozen_or_unfrozen_later_is_named(trains: bool) -> None:
    """Decay and momentum moved frozen ones on, and unfrozen ones failed amid the backward pass."""

    def train(comm: lc.Communicator) -> None:
        net = made()
        net.head.bias.requires_grad_(not trains)
        sharded = ShardedModule(net, comm)
        net.head.bias.requires_grad_(trains)
        with (
            pytest.raises(errors.StepError, match=r"requires_grad of head\.bias is not what it was"),
            sharded.step(),
        ):
            pass

    lc.run_loopback(1, train, 20)


@pytest.mark.parametrize("within", ["forward", "backward", "evaluation"])
def test_after_an_error_amid_a_pass_and_a_reset_training_goes_on(within: str) -> None:
    """Units that were open then counted as open ever after, with views of memory that others use."""

    def broken(*args: Any) -> None:
        raise ZeroDivisionError("in a hook")

    def train(comm: lc.Communicator, fails: bool) -> dict[str, np.ndarray]:
        net = made()
        sharded = ShardedModule(net, comm)
        inner = net.blocks[1]
        if fails:
            hook = (
                inner.up.register_full_backward_hook(broken)
                if within == "backward"
                else inner.up.register_forward_hook(broken)
            )
            step = contextlib.nullcontext() if within == "evaluation" else sharded.step()
            with pytest.raises(ZeroDivisionError), step:
                loss_of(net, 0, comm.rank).backward()
            hook.remove()
            sharded.engine.reset()
        for _ in range(2):
            with sharded.step():
                loss_of(net, 0, comm.rank).backward()
            sharded.engine.join()
            sharded.engine.update(AdamW(lr=1e-2))
        return dict(sharded.full_state())

    clean, mended = (
        lc.run_loopback(2, lambda comm, f=fails: train(comm, f), 20)[0] for fails in (False, True)
    )
    for name, value in clean.items():
        np.testing.assert_array_equal(mended[name], value, err_msg=name)
