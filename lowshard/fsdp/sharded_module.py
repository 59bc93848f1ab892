"""Trains an unmodified torch.nn.Module on CPU ranks: hooks that open, close and reduce units around autograd.

Parameters become views of the engine's buffers while their unit is open, and hold nothing else. What autograd saves of
them for the backward pass is not kept: it is looked up again in the unit, opened anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from lowshard.box import Box
from lowshard.comm import Communicator
from lowshard.errors import DependencyError, LayoutError
from lowshard.fsdp.fsdp_engine import FSDP
from lowshard.fsdp.fsdp_strategy import ShardingStrategy
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
    `broadcast_updated_params` as with any engine. The module is called as before.

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
        LayoutError: parameters of a dtype that is no float.

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
        self.engine = FSDP(model, comm, strategy, **{"open_limit": 3, **options})
        values = {f"{u}.{n}": p.detach() for u, ps in self._params.items() for n, p in ps.items()}

        def value(name: str, box: Box) -> Array:
            part = values[name][tuple(slice(lo, hi) for lo, hi in box)]
            return part.float().numpy() if part.dtype == torch.bfloat16 else part.numpy()

        self.engine.fill(value)
        values.clear()
        for params in self._params.values():
            for param in params.values():
                param.data = torch.empty(0, dtype=param.dtype)
        self._hook()

    # ---- use

    @contextmanager
    def step(self, last: bool = True) -> Iterator[ShardedModule]:
        """A micro-batch: forward and backward; see `FSDP.step`. Units that got no gradient are reduced with zeros."""
        self._missing = {
            unit: {name for name, param in params.items() if param.requires_grad}
            for unit, params in self._params.items()
        }
        hooks = self._torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        with self.engine.step(last):
            with hooks:
                yield self
            for unit, missing in self._missing.items():
                while self._open.get(unit):
                    self._close(unit)
                if missing:
                    self._finish(unit)

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

    # ---- what is where

    def _divide(self, units: list[Module]) -> dict[str, Module]:
        paths = {id(child): path for path, child in self.module.named_modules()}
        modules: dict[str, Module] = {}
        for child in units:
            path = paths.get(id(child))
            if path is None:
                raise LayoutError("ShardedModule: units are submodules of the module")
            self._take(path, child)
            modules[path] = child
        self._take(_ROOT, self.module)
        modules[_ROOT] = self.module
        empty = [name for name in modules if not self._params[name] and not self._ties[name]]
        for name in empty:
            del modules[name], self._params[name]
        return modules

    def _take(self, unit: str, child: Module) -> None:
        self._params[unit], self._ties[unit] = {}, []
        for path, param in child.named_parameters(remove_duplicate=False):
            short = path.replace(".", "/")
            if str(param.dtype) not in _DTYPES:
                raise LayoutError(
                    f"ShardedModule: parameter {path} is {param.dtype}, and only floats can be sharded"
                )
            home = self._home.get(id(param))
            if home is None:
                self._home[id(param)] = unit, short
                self._params[unit][short] = param
            elif home[0] != unit and unit != _ROOT:
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
            child.register_forward_pre_hook(lambda module, args, unit=unit: self._enter(unit, "forward"))
            child.register_forward_hook(lambda module, args, out, unit=unit: self._close(unit))
            for name, param in self._params[unit].items():
                if param.requires_grad:
                    # Autograd lays a gradient out as the parameter is, so that must be whole by then.
                    param.register_hook(lambda grad, unit=unit: self._expect(unit))
                    param.register_post_accumulate_grad_hook(
                        lambda param, unit=unit, name=name: self._arrived(unit, name, param)
                    )

    def _enter(self, unit: str, phase: Any) -> None:
        self._open[unit] = self._open.get(unit, 0) + 1
        if self._open[unit] > 1:
            return
        views = self.engine.open(unit, phase)
        params = self._params[unit] | {name: param for name, _, param in self._ties[unit]}
        self._ranges[unit] = []
        for name, param in params.items():
            param.data = self._tensor(views[name])
            first = param.data.data_ptr()
            self._ranges[unit].append((first, first + param.data.nbytes, name))

    def _close(self, unit: str) -> None:
        self._open[unit] -= 1
        if self._open[unit]:
            return
        for params in (self._params[unit], {name: param for name, _, param in self._ties[unit]}):
            for param in params.values():
                owner = self._home[id(param)][0]
                if owner == unit or not self._open.get(owner):
                    param.data = self._torch.empty(0, dtype=param.dtype)
        del self._ranges[unit]
        self.engine.close(unit)

    def _tensor(self, view: Array) -> Tensor:
        if view.dtype.name == "bfloat16":
            return self._torch.from_numpy(view.view(np.int16)).view(self._torch.bfloat16)
        return self._torch.from_numpy(view)

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
        view = self._tensor(self.engine._opener.views(saved.unit)[saved.name])
        return view.as_strided(saved.size, saved.stride, view.storage_offset() + saved.offset)

    def _expect(self, unit: str) -> None:
        """A gradient is about to come."""
        if not self._open.get(unit):
            self._enter(unit, "backward")

    def _arrived(self, unit: str, name: str, param: Tensor) -> None:
        """A gradient is there: it goes into the engine, and with the unit's last one the reduction starts."""
        target = self._tensor(self.engine.grads(unit)[name])
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
