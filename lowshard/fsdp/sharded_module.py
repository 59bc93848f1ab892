"""Trains an unmodified torch.nn.Module on CPU ranks: hooks that open, close and reduce units around autograd.

Parameters become views of the engine's buffers while their unit is open, and hold nothing else. What autograd saves of
them for the backward pass is not kept: it is looked up again in the unit, opened anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from lowshard.comm import Communicator
from lowshard.errors import DependencyError, LayoutError, StepError
from lowshard.fsdp.closed_parameter import NOT_PICKLED, closed_parameter
from lowshard.fsdp.fsdp_engine import FSDP
from lowshard.fsdp.fsdp_strategy import ShardingStrategy
from lowshard.fsdp.module_state import ModuleState, array_of, tensor_of
from lowshard.fsdp.param import Param

Array = Any
Module = Any  # torch ships types, but may not be there
Tensor = Any

_ROOT = "root"
_DTYPES = {
    "torch.float32": "float32",
    "torch.bfloat16": "bfloat16",
    "torch.float16": "float16",
    "torch.float64": "float64",
}


@dataclass(frozen=True)
class _Saved:
    """A tensor that autograd wants back: a view of a parameter."""

    unit: str
    name: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class ShardedModule:
    """A module whose parameters a `FSDP` engine holds.

    `with sharded.step(): loss = ...; loss.backward()`, then `sharded.engine.join()`, `clip`, `update` and
    `broadcast_updated_params` as with any engine. The module is called as before, or as `sharded(...)`.

    Between uses torch's parameters hold nothing. `module.state_dict()` and `module.load_state_dict()` give and take
    whole tensors all the same, and are collective. What else would see the nothing raises StepError: pickling and
    copying the module or a parameter, reading `grad` while the engine has it, the step of an optimizer of torch's.

    Collective: all ranks of the communicator make it.

    Args:
        module: on the CPU, of equal structure and values on all ranks.
        comm: the world.
        strategy: as for `FSDP`.
        units: submodules that are gathered together, in the order of the forward pass; by default the children of the
            module, and of a ModuleList or Sequential among them, that have parameters. What is left is one more unit.
        options: of `FSDP`. open_limit is 3 by default, since the unit of what is left stays open around the others.

    Raises:
        DependencyError: torch is not installed.
        LayoutError: parameters of a dtype that is not a float.

    Attributes:
        module: the module.
        engine: the `FSDP` that holds the parameters.
    """

    def __init__(
        self,
        module: Module,
        comm: Communicator,
        strategy: ShardingStrategy = ShardingStrategy.FullShard,
        *,
        units: list[Module] | None = None,
        **options: Any,
    ) -> None:
        try:
            import torch
        except ImportError as error:
            raise DependencyError(f"ShardedModule needs torch ({error}): pip install torch") from error
        self._torch, self.module = torch, module
        self._params: dict[str, dict[str, Any]] = {}  # by unit and short name
        self._home: dict[int, tuple[str, str]] = {}  # of a parameter, by its identity
        self._ties: dict[str, list[tuple[str, str, Any]]] = {}
        self._modules = self._divide(list(_children(module)) if units is None else units)
        self._open: dict[str, int] = {}
        self._missing: dict[str, set[str]] = {}
        self._ranges: dict[str, list[tuple[int, int, str]]] = {}
        model = {name: self._describe(name) for name in self._params}
        self._holders: dict[int, list[str]] = {
            id(p): [u] for u, ps in self._params.items() for p in ps.values()
        }
        for unit, ties in self._ties.items():
            for _, _, param in ties:
                self._holders[id(param)].append(unit)
        self._trains = {id(p): p.requires_grad for params in self._params.values() for p in params.values()}
        self.engine = FSDP(model, comm, strategy, **{"open_limit": 3, **options})
        values = {f"{u}.{n}": p.detach() for u, ps in self._params.items() for n, p in ps.items()}
        self.engine.fill(lambda name, box: array_of(values[name][tuple(slice(lo, hi) for lo, hi in box)]))
        values.clear()
        kind = closed_parameter(torch)
        for unit, params in self._params.items():
            for param in params.values():
                param.data = torch.empty(0, dtype=param.dtype)
                param.__class__ = kind
                param._lowshard_has_grad = partial(self.engine.has_grad, unit)
        homes = {key: f"{unit}.{name}" for key, (unit, name) in self._home.items()}
        self._state = ModuleState(module, self.engine, comm, homes)
        self._hook()

    # ---- use

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*args, **kwargs)

    @contextmanager
    def step(self, last: bool = True) -> Iterator[ShardedModule]:
        """A micro-batch: forward and backward; see `FSDP.step`. Units that got no gradient are reduced with zeros.

        Raises:
            StepError: a parameter was frozen or unfrozen since the ShardedModule was made.
        """
        changed = [
            name
            for name, param in self.module.named_parameters()
            if param.requires_grad != self._trains.get(id(param), param.requires_grad)
        ]
        if changed:  # decay and momentum would go on moving it, or its gradient would have no place
            self.engine._wrong(StepError(
                f"step: requires_grad of {changed[0]} is not what it was when the ShardedModule was made, which laid "
                "out gradients and optimizer state by it; set it before, and make the ShardedModule anew from a plain "
                "module that has loaded sharded.state_dict()"
            ))  # fmt: skip
        self._missing = {
            unit: {name for name, param in params.items() if param.requires_grad}
            for unit, params in self._params.items()
        }
        hooks = self._torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        try:
            with self.engine.step(last):
                with hooks:
                    yield self
                for unit, missing in self._missing.items():
                    while self._open.get(unit):
                        self._close(unit)
                    if missing:
                        self._finish(unit)
        except BaseException:
            self._give_up()
            raise
        finally:
            self._missing = {}

    def full_state(self) -> Mapping[str, np.ndarray]:
        """Return every parameter whole, by the module's own names, in the master dtype.

        Collective: all ranks of the communicator call this.
        """
        names = {id(param): name for name, param in self.module.named_parameters()}
        return {
            names[id(param)]: self.engine.full(f"{unit}.{short}")
            for unit, params in self._params.items()
            for short, param in params.items()
        }

    def state_dict(self, options: Any = None, *, device_mesh: Any = None) -> dict[str, Any]:
        """Return parameters and buffers by the module's names, new tensors in the dtypes of the module.

        Collective: all ranks of the communicator call this; then one of them may save it.

        Args:
            options: `torch.distributed.checkpoint.state_dict.StateDictOptions`, with torch's meaning. None, or
                full_state_dict=True: whole tensors on every rank; with cpu_offload=True too, on rank 0 alone and
                nothing on the others. full_state_dict=False, torch's default: DTensors cut by rows over the shard
                group (`Shard(0)`), which need a torch process group of the same ranks. ignore_frozen_params leaves
                frozen ones out.
            device_mesh: of the DTensors, `(shards,)` or `(replicas, shards)`; by default without names, as FSDP2's,
                or named replicate and shard.

        Raises:
            StepError: DTensors without such a process group. MeshError: another mesh.
        """
        return self._state.state_dict(options, device_mesh)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False, *, options: Any = None
    ) -> Any:
        """Load whole tensors or DTensors by the module's names, and return torch's missing and unexpected keys.

        The state of the optimizer stays as it is.

        Collective: all ranks of the communicator call this, with equal values.

        Args:
            state_dict: what `state_dict` gave, here or with other ranks or strategies, or that of a plain module.
            strict: whether missing and unexpected names raise.
            assign: is not for sharded parameters.
            options: StateDictOptions: `strict`; with full_state_dict and broadcast_from_rank0 rank 0's tensors are
                sent to the others, whatever they pass.

        Raises:
            RuntimeError: torch's, of names and shapes that do not fit; of shapes: no parameter has changed then.
            StepError: assign=True, or options that contradict each other.
            MismatchError: ranks load different names.
        """
        return self._state.load_state_dict(state_dict, strict, assign, options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StepError(NOT_PICKLED)

    # ---- what is where

    def _divide(self, units: list[Module]) -> dict[str, Module]:
        paths = {id(child): path for path, child in self.module.named_modules()}
        modules: dict[str, Module] = {}
        for child in units:
            path = paths.get(id(child))
            if not path:
                raise LayoutError("ShardedModule: units are submodules of the module")
            if path in modules:  # one module at several places
                continue
            self._take(path, child, modules)
            modules[path] = child
        root = _ROOT if _ROOT not in modules else f"({_ROOT})"
        self._take(root, self.module, modules)
        modules[root] = self.module
        empty = [name for name in modules if not self._params[name] and not self._ties[name]]
        for name in empty:
            del modules[name], self._params[name]
        return modules

    def _take(self, unit: str, child: Module, before: Mapping[str, Module]) -> None:
        """Take the parameters of a unit that none before it has; those of units within it open by themselves."""
        self._params[unit], self._ties[unit] = {}, []
        units = {id(module) for module in before.values()}
        inner = {path for path, module in child.named_modules(remove_duplicate=False) if id(module) in units}
        for path, param in child.named_parameters(remove_duplicate=False):
            short = path.replace(".", "/")
            if str(param.dtype) not in _DTYPES:
                raise LayoutError(
                    f"ShardedModule: parameter {path} is {param.dtype}, and only floats can be sharded"
                )
            if isinstance(param, closed_parameter(self._torch)):
                raise LayoutError(
                    f"ShardedModule: parameter {path} is in another ShardedModule, and holds nothing here; go on with "
                    "that one, or load its state_dict() into a plain module"
                )
            home = self._home.get(id(param))
            if home is None:
                self._home[id(param)] = unit, short
                self._params[unit][short] = param
            elif home[0] != unit and inner.isdisjoint(accumulate(path.split("."), "{}.{}".format)):
                self._ties[unit].append((short, f"{home[0]}.{home[1]}", param))

    def _describe(self, unit: str) -> list[Param]:
        own = [
            Param(name, tuple(p.shape), _DTYPES[str(p.dtype)], trainable=bool(p.requires_grad))
            for name, p in self._params[unit].items()
        ]
        tied = [
            Param(name, tuple(p.shape), _DTYPES[str(p.dtype)], trainable=bool(p.requires_grad), tie=target)
            for name, target, p in self._ties[unit]
        ]
        return own + tied

    # ---- around autograd

    def _hook(self) -> None:
        for unit, child in self._modules.items():
            # No lambdas: who pickles or copies the module comes to this object, which says what to write.
            child.register_forward_pre_hook(partial(self._before, unit))
            child.register_forward_hook(partial(self._after, unit))
            for name, param in self._params[unit].items():
                if param.requires_grad:
                    # Autograd lays a gradient out as the parameter is, so that must be whole by then.
                    param.register_hook(lambda grad, unit=unit: self._expect(unit))
                    param.register_post_accumulate_grad_hook(
                        lambda param, unit=unit, name=name: self._arrived(unit, name, param)
                    )

    def _before(self, unit: str, module: Module, args: Any) -> None:
        self._enter(unit, "forward")

    def _after(self, unit: str, module: Module, args: Any, out: Any) -> None:
        self._close(unit)

    def _give_up(self) -> None:
        """Close all units here, as the engine's reset does there, and drop gradients that it has not got."""
        for params in self._params.values():
            for param in params.values():
                param.data, param.grad = self._torch.empty(0, dtype=param.dtype), None
        self._open, self._ranges = {}, {}

    def _enter(self, unit: str, phase: Any) -> None:
        if self._open.get(unit) and not self.engine._opener.is_open(unit):  # a reset has closed it
            self._give_up()
        self._open[unit] = self._open.get(unit, 0) + 1
        if self._open[unit] > 1:
            return
        views = self.engine.open(unit, phase)
        params = self._params[unit] | {name: param for name, _, param in self._ties[unit]}
        self._ranges[unit] = []
        for name, param in params.items():
            param.data = tensor_of(views[name])
            first = param.data.data_ptr()
            self._ranges[unit].append((first, first + param.data.nbytes, name))

    def _close(self, unit: str) -> None:
        self._open[unit] -= 1
        if self._open[unit]:
            return
        for params in (self._params[unit], {name: param for name, _, param in self._ties[unit]}):
            for param in params.values():
                if not any(self._open.get(holder) for holder in self._holders[id(param)]):
                    param.data = self._torch.empty(0, dtype=param.dtype)
        del self._ranges[unit]
        self.engine.close(unit)

    def _pack(self, tensor: Tensor) -> Any:
        if tensor.device.type != "cpu" or not tensor.numel():
            return tensor
        address = tensor.data_ptr()
        for unit, ranges in self._ranges.items():
            for first, stop, name in ranges:
                if first <= address < stop:
                    offset = (address - first) // tensor.element_size()
                    return _Saved(unit, name, offset, tuple(tensor.shape), tuple(tensor.stride()))
        return tensor

    def _unpack(self, saved: Any) -> Tensor:
        if not isinstance(saved, _Saved):
            return saved
        if not self._open.get(saved.unit):
            self._enter(saved.unit, "backward")
        view = tensor_of(self.engine._opener.views(saved.unit)[saved.name])
        return view.as_strided(saved.size, saved.stride, view.storage_offset() + saved.offset)

    def _expect(self, unit: str) -> None:
        """A gradient is about to come."""
        if unit not in self._missing:
            raise StepError(
                "backward of a sharded module outside of a step: write `with sharded.step(): loss = ...; "
                "loss.backward()`, with the forward pass inside too"
            )
        if not self._open.get(unit):
            self._enter(unit, "backward")

    def _arrived(self, unit: str, name: str, param: Tensor) -> None:
        """A gradient is there: it goes into the engine, and with the unit's last one the reduction starts."""
        target = tensor_of(self.engine._own_grads(unit)[name])
        target.add_(param.grad)
        param.grad = None
        missing = self._missing[unit]
        missing.discard(name)
        if not missing:
            self._finish(unit)

    def _finish(self, unit: str) -> None:
        if not self._open.get(unit):
            self._enter(unit, "backward")
        self.engine.reduce(unit)
        self._missing[unit] = set()
        while self._open.get(unit):
            self._close(unit)


def _children(module: Module) -> Iterator[Module]:
    """Yield the units of a module that names none: children with parameters, and those inside of lists."""
    for child in module.children():
        if type(child).__name__ in ("ModuleList", "Sequential"):
            yield from (inner for inner in child.children() if next(inner.parameters(), None) is not None)
        elif next(child.parameters(), None) is not None:
            yield child
