"""A sharded module's state dict, and what would see that its parameters hold nothing."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import fsdp_kit as kit

from lowshard import comm as lc
from lowshard.errors import LowshardError, MismatchError, StepError
from lowshard.fsdp import SGD, AdamW, ShardingStrategy

torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")

from torch.distributed.checkpoint.state_dict import (  # noqa: E402
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

from lowshard.fsdp.torch import ShardedModule  # noqa: E402


class Net(torch.nn.Module):  # type: ignore[misc,name-defined]
    """With a tie, a frozen bias, a scalar, buffers, and fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(29, 37)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(37, 37) for _ in range(2)])
        self.norm = torch.nn.BatchNorm1d(37)
        self.small = torch.nn.Linear(37, 2)
        self.head = torch.nn.Linear(37, 29)
        self.head.weight = self.embed.weight
        self.blocks[0].bias.requires_grad_(False)
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens) * self.scale
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        x = self.norm(x)
        return self.head(x) * (1 + torch.tanh(self.small(x)).sum(-1, keepdim=True))


_SEEDING = threading.Lock()


def made(seed: int = 3) -> Any:
    with _SEEDING:  # torch's generator is one for all threads
        torch.manual_seed(seed)
        return Net()


def loss_of(net: Any, step: int) -> Any:
    rng = np.random.default_rng(step)
    tokens, targets = (torch.from_numpy(rng.integers(0, 29, 12)) for _ in range(2))
    return torch.nn.functional.cross_entropy(net(tokens), targets)


def same(found: Any, wanted: Any) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def on_ranks(world: int, function: Callable[[lc.Communicator], Any]) -> list[Any]:
    torch.set_num_threads(1)
    return lc.run_loopback(world, function, 60)


@pytest.mark.parametrize(
    ("world", "name", "next_world", "next_name"),
    [(1, "full", 4, "full"), (2, "full", 1, "none"), (4, "full", 2, "sgo"), (2, "none", 4, "hybrid2"),
     (4, "hybrid2", 2, "full")],
)  # fmt: skip
def test_a_state_dict_goes_round(world: int, name: str, next_world: int, next_name: str) -> None:
    plain = made()
    wanted = plain.state_dict()

    def out(comm: lc.Communicator) -> Any:
        net = made()
        sharded = ShardedModule(net, comm, kit.STRATEGIES[name])
        state = sharded.state_dict()
        same(state, wanted)
        same(net.state_dict(), wanted)
        assert state["head.weight"] is state["embed.weight"]  # tied, as in the module
        same(net.blocks[1].state_dict(prefix="b."), plain.blocks[1].state_dict(prefix="b."))
        outer = torch.nn.Sequential(net, torch.nn.Linear(2, 2))
        same(
            {k: v for k, v in outer.state_dict().items() if k[0] == "0"},
            {f"0.{k}": v for k, v in wanted.items()},
        )
        state["scale"] += 1  # the caller's own
        state["norm.running_mean"] = state["norm.running_mean"] + 2
        return through_a_file(state)

    changed = {
        k: v + 1 if k == "scale" else v + 2 if k == "norm.running_mean" else v for k, v in wanted.items()
    }
    for state in on_ranks(world, out):
        same(state, changed)
    again = made(5)
    again.load_state_dict(state)
    same(again.state_dict(), changed)

    def back(comm: lc.Communicator) -> None:
        net = made(5)
        sharded = ShardedModule(net, comm, kit.STRATEGIES[next_name])
        keys = sharded.load_state_dict({k: v.double() if k == "small.bias" else v for k, v in state.items()})
        assert (keys.missing_keys, keys.unexpected_keys) == ([], [])
        same(sharded.state_dict(), changed)
        with torch.no_grad():
            net.eval()
            x = torch.arange(7)
            torch.testing.assert_close(sharded(x), again.eval()(x))
        net.load_state_dict(made(7).state_dict())
        same(net.state_dict(), made(7).state_dict())

    on_ranks(next_world, back)


@pytest.mark.parametrize(
    "options", [{"full_state_dict": True}, {"full_state_dict": True, "cpu_offload": True}]
)
def test_options_choose_as_torch_does(options: dict[str, bool]) -> None:
    def look(comm: lc.Communicator) -> None:
        sharded = ShardedModule(made(), comm)
        found = sharded.state_dict(StateDictOptions(**options))
        same(found, {} if "cpu_offload" in options and comm.rank else made().state_dict())
        found = sharded.state_dict(StateDictOptions(full_state_dict=True, ignore_frozen_params=True))
        assert set(made().state_dict()) - set(found) == {"blocks.0.bias"}
        with pytest.raises(StepError, match="init_process_group"):
            sharded.state_dict(StateDictOptions())
        same(sharded.state_dict(), made().state_dict())

    on_ranks(2, look)


def test_torchs_own_functions_see_the_whole_model() -> None:
    def look(comm: lc.Communicator) -> None:
        net, other = made(), made(5).state_dict()
        ShardedModule(net, comm)
        same(get_model_state_dict(net), made().state_dict())
        same(get_model_state_dict(net, options=StateDictOptions(full_state_dict=True)), made().state_dict())
        set_model_state_dict(net, dict(other))
        same(net.state_dict(), other)

    on_ranks(2, look)


def test_rank_0_alone_may_have_the_values() -> None:
    other = made(5).state_dict()

    def look(comm: lc.Communicator) -> None:
        sharded = ShardedModule(made(), comm)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        sharded.load_state_dict(other if comm.rank == 0 else {}, options=options)
        same(sharded.state_dict(), other)
        with pytest.raises(StepError, match="whole tensors"):
            sharded.load_state_dict(other, options=StateDictOptions(broadcast_from_rank0=True))
        wrong = {**other, "small.weight": torch.zeros(3, 37)}
        with pytest.raises(RuntimeError, match=r"size mismatch for small\.weight"):
            sharded.load_state_dict(wrong if comm.rank == 0 else {}, options=options)
        same(sharded.state_dict(), other)

    on_ranks(2, look)


def test_what_does_not_fit_changes_nothing_and_says_what_torch_says() -> None:
    start, other = made().state_dict(), made(5).state_dict()

    def look(comm: lc.Communicator) -> None:
        net = made()
        sharded = ShardedModule(net, comm)
        for wrong in (torch.zeros(3, 37), torch.zeros(74)):
            text = r"size mismatch for small.weight: .* shape in current model is \(2, 37\)"
            with pytest.raises(RuntimeError, match=text):
                sharded.load_state_dict({**other, "small.weight": wrong})
            for name, _ in net.named_parameters():
                assert torch.equal(net.state_dict()[name], start[name])
        with pytest.raises(RuntimeError, match=r"expected torch\.Tensor"):
            net.load_state_dict({**other, "scale": 3.0})
        with pytest.raises(RuntimeError, match=r"Missing key.*embed.weight.*\n.*Unexpected key.*there"):
            net.load_state_dict(
                {"there": torch.zeros(1)} | {k: v for k, v in other.items() if k != "embed.weight"}
            )
        with pytest.raises(StepError, match="assign=True"):
            net.load_state_dict(other, assign=True)
        sharded.load_state_dict(start)
        few = {"scale": torch.tensor([4.0]), "there": torch.zeros(1)}
        assert sharded.load_state_dict(few, strict=False) == made().load_state_dict(few, strict=False)
        same(sharded.state_dict(), {**start, "scale": torch.tensor(4.0)})
        net.blocks[1].load_state_dict({"weight": torch.ones(37, 37), "bias": torch.zeros(37)})
        assert torch.equal(net.state_dict()["blocks.1.weight"], torch.ones(37, 37))
        outer = torch.nn.Sequential(torch.nn.Linear(2, 2), net)
        outer.load_state_dict({f"1.{k}": v for k, v in other.items()}, strict=False)
        same(net.state_dict(), other)

    on_ranks(2, look)


def test_ranks_that_load_different_names_all_learn_it() -> None:
    start = made().state_dict()

    def look(comm: lc.Communicator) -> None:
        sharded = ShardedModule(made(), comm)
        with pytest.raises(MismatchError, match="load_state_dict"):
            sharded.load_state_dict(made(5).state_dict() if comm.rank else {}, strict=False)
        same(sharded.state_dict(), start)

    on_ranks(3, look)


def test_a_state_dict_of_one_rank_alone_is_told_to_all() -> None:
    """As a program does that saves on rank 0 and forgets the others."""

    def look(comm: lc.Communicator) -> str:
        sharded = ShardedModule(made(), comm)
        try:
            if comm.rank == 0:
                sharded.state_dict()
            with sharded.step():
                loss_of(sharded, comm.rank).backward()
        except LowshardError as error:
            return f"{error} {getattr(error, '__notes__', '')}"
        return "nothing"

    torch.set_num_threads(1)
    said = lc.run_loopback(2, look, 20)
    assert "nothing" not in said
    assert "all ranks call it" in said[0]
    assert "rank 0 asked for all_gather" in said[1]


@pytest.mark.parametrize("rule", ["adamw", "sgd", "adamw then sgd"])
def test_two_optimizers_and_clip_are_torchs(rule: str) -> None:
    """One after the other too: a slot has the state of both."""
    plain = made()
    rules = {
        "adamw": (
            AdamW(lr=1e-2, weight_decay=0.1),
            torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1),
        ),
        "sgd": (SGD(lr=0.1, momentum=0.9), torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)),
    }
    plan = [rules[word] for word in rule.split() if word != "then" for _ in range(3)]
    norms = []
    for step, (_, theirs) in enumerate(plan):
        plain.zero_grad()
        loss_of(plain, step).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)))
        theirs.step()

    def train(comm: lc.Communicator) -> Any:
        sharded = ShardedModule(made(), comm)
        for step, (ours, _) in enumerate(plan):
            with sharded.step():
                loss_of(sharded, step).backward()
            sharded.engine.join()
            assert sharded.engine.clip(0.5) == pytest.approx(norms[step], rel=1e-5)
            sharded.engine.update(ours)
            sharded.engine.broadcast_updated_params()
        return sharded.state_dict()

    for world in (1, 2, 4):
        for found in on_ranks(world, train):
            for name, value in plain.state_dict().items():
                torch.testing.assert_close(found[name], value, rtol=2e-5, atol=2e-6, msg=name)


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "LBFGS"])
def test_an_outside_optimizer_raises_at_its_first_step(kind: str) -> None:
    def look(comm: lc.Communicator) -> None:
        net = made()
        sharded = ShardedModule(net, comm)
        trained = [param for param in net.parameters() if param.requires_grad]
        optimizer = getattr(torch.optim, kind)(trained, lr=0.1)
        closure = (lambda: torch.zeros(())) if kind == "LBFGS" else None
        with pytest.raises(StepError, match=rf"torch.optim.{kind}.step\(\): .*engine.update\(rule\)"):
            optimizer.step(closure)
        optimizer.zero_grad()
        with sharded.step():
            loss_of(sharded, comm.rank).backward()
        with pytest.raises(StepError, match=rf"torch.optim.{kind}.step\(\)"):
            optimizer.step(closure)
        sharded.engine.join()
        for read in (
            lambda: torch.nn.utils.clip_grad_norm_(trained, 1.0),
            lambda: trained[0].grad,
            optimizer.zero_grad,
            net.zero_grad,
        ):
            with pytest.raises(StepError, match=r"in the engine, not in param\.grad"):
                read()
        sharded.engine.update(SGD(lr=0.1))
        sharded.engine.broadcast_updated_params()
        optimizer.zero_grad()
        assert all(param.grad is None for param in net.parameters())
        other = torch.nn.Linear(2, 2)  # whose optimizer is nobody's business
        other(torch.ones(2)).sum().backward()
        torch.optim.SGD(other.parameters(), lr=0.1).step()

    on_ranks(2, look)


@pytest.mark.parametrize("strategy", [ShardingStrategy.FullShard, ShardingStrategy.NoShard], ids=repr)
def test_nothing_is_saved_or_copied_as_emptiness(strategy: ShardingStrategy) -> None:
    def look(comm: lc.Communicator) -> None:
        net = made()
        sharded = ShardedModule(net, comm, strategy)
        for thing in (net, sharded, net.head, net.embed, list(net.parameters()), net.scale, net.blocks):
            with pytest.raises(StepError, match=r"cannot be pickled or copied.*state_dict"):
                torch.save(thing, io.BytesIO())
            with pytest.raises(StepError, match="cannot be pickled or copied"):
                pickle.dumps(thing)
            with pytest.raises(StepError, match="cannot be pickled or copied"):
                copy.deepcopy(thing)
        same(through_a_file(net.state_dict()), made().state_dict())
        same(through_a_file(sharded.state_dict()), made().state_dict())

    on_ranks(2, look)


def test_a_backward_pass_outside_of_a_step_says_so() -> None:
    def look(comm: lc.Communicator) -> None:
        sharded = ShardedModule(made(), comm)
        for _ in range(2):
            with pytest.raises(StepError, match="outside of a step"):
                loss_of(sharded, 0).backward()
            sharded.engine.reset()
            with sharded.step():
                loss_of(sharded, comm.rank).backward()
            sharded.engine.join()
            sharded.engine.update(SGD(lr=0.1))
            sharded.engine.broadcast_updated_params()

    on_ranks(2, look)
