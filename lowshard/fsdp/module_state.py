"""The state dict of a module whose parameters are sharded: whole tensors or DTensors out, either of them in.

Hooks do it, so that `module.state_dict()`, `module.load_state_dict()` and those of modules around it or within it work.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal
from weakref import ref

import numpy as np

from lowshard.argument import brief
from lowshard.box import Box, strides_of
from lowshard.comm import Communicator, agree
from lowshard.comm.agreement import share_text
from lowshard.content_hash import text_digest
from lowshard.errors import MeshError, MismatchError, StepError
from lowshard.fsdp.closed_parameter import NOT_PICKLED
from lowshard.fsdp.flat_plan import flat_boxes
from lowshard.fsdp.fsdp_engine import FSDP
from lowshard.fsdp.model_state import param_rows

Array = Any
Module = Any  # torch ships types, but may not be there
Tensor = Any
Form = Literal["whole", "dtensor"]


class Parts:
    """What this rank holds of a parameter, cut out of the whole one: `[box]` of the engine's boxes.

    Attributes:
        shape: of the parameter.
        boxes: arrays by box.
    """

    def __init__(self, shape: tuple[int, ...], boxes: dict[Box, np.ndarray]) -> None:
        self.shape, self.boxes = shape, boxes


class ModuleState:
    """Hooks on a module that make its state dict that of the parameters which an engine holds.

    Args:
        module: whose parameters hold nothing while their unit is closed.
        engine: has them.
        comm: the engine's.
        homes: the engine's full name of a parameter, by the identity of torch's.
    """

    def __init__(self, module: Module, engine: FSDP, comm: Communicator, homes: Mapping[int, str]) -> None:
        import torch

        self._torch, self._module, self._engine, self._comm, self._homes = torch, module, engine, comm, homes
        self._form: Form = "whole"
        self._made_mesh: Any = None
        self._mesh: Any = None  # of the DTensors that are being made
        self._made: tuple[Any, dict[int, Tensor]] = (lambda: None, {})  # for which dict, and what is in it
        self._within: Counter[int] = Counter()  # modules that a load under way is still to come to
        for child in module.modules():
            child.register_state_dict_post_hook(partial(self._fill_in))  # torch marks the object
            child.register_load_state_dict_pre_hook(self._take)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StepError(NOT_PICKLED)

    # ---- out

    def state_dict(self, options: Any = None, device_mesh: Any = None) -> dict[str, Tensor]:
        """Return the module's state dict; see `ShardedModule.state_dict`."""
        if options is None:
            return dict(self._module.state_dict())
        if not options.full_state_dict:
            self._mesh = self._own_mesh() if device_mesh is None else self._checked(device_mesh)
            self._form = "dtensor"
        try:
            found = dict(self._module.state_dict())
        finally:
            self._form = "whole"
        if options.ignore_frozen_params:
            for name, param in self._module.named_parameters(remove_duplicate=False):
                if not param.requires_grad:
                    found.pop(name, None)
        return {} if options.full_state_dict and options.cpu_offload and self._comm.rank else found

    def _fill_in(self, module: Module, state: dict[str, Tensor], prefix: str, metadata: Any) -> None:
        """Put what the ranks hold in the place of a module's own parameters."""
        for name, param in module._parameters.items():
            if id(param) in self._homes and prefix + name in state:
                of, made = self._made
                if of() is not state:
                    made = {}
                    self._made = ref(state), made
                if id(param) not in made:  # tied ones are one tensor, as they are in the module
                    made[id(param)] = self._whole(param) if self._form == "whole" else self._dtensor(param)
                state[prefix + name] = made[id(param)]

    def _whole(self, param: Tensor) -> Tensor:
        try:
            return tensor_of(self._engine.full(self._homes[id(param)])).to(param.dtype)
        except MismatchError as error:
            error.add_note("state_dict() of a sharded module gathers: all ranks call it, then one may save")
            raise

    def _dtensor(self, param: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        grid = self._engine.grid
        layout, rows = param_rows(self._engine, self._homes[id(param)], "ceil")
        placed = [Replicate()] if grid.replicas > 1 else []
        if len(self._sizes()) > len(placed):
            placed.append(Shard(0) if layout.shape else Replicate())
        return DTensor.from_local(
            tensor_of(rows).to(param.dtype), self._mesh, placed, run_check=False,
            shape=self._torch.Size(layout.shape), stride=tuple(strides_of(layout.shape)),
        )  # fmt: skip

    def _sizes(self) -> tuple[int, ...]:
        """Return the sizes of torch's mesh: of replicas, where there are some, and of shards."""
        grid = self._engine.grid
        return tuple(n for n in (grid.replicas, grid.shards) if n > 1) or (1,)

    def _own_mesh(self) -> Any:
        """Return the mesh that FSDP2 makes where it is given none, or one of replicas and shards."""
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        mine = self._comm.rank, self._comm.size
        theirs = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None
        if theirs != mine:
            there = "there is none" if theirs is None else f"this is rank {theirs[0]} of {theirs[1]} there"
            raise StepError(
                f"state_dict: DTensors need a torch process group of the same ranks (rank {mine[0]} of {mine[1]}), "
                f"and {there}. Write torch.distributed.init_process_group(...) first, or "
                "StateDictOptions(full_state_dict=True) for whole tensors"
            )
        if self._made_mesh is None:
            sizes = self._sizes()
            names = ("replicate", "shard") if len(sizes) == 2 else None
            self._made_mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        return self._made_mesh

    def _checked(self, mesh: Any) -> Any:
        shape, ranks = tuple(mesh.mesh.shape), mesh.mesh.flatten().tolist()
        if shape != self._sizes() or ranks != list(range(self._comm.size)):
            raise MeshError(
                f"state_dict: the device mesh is {self._sizes()} (replicas, where there are some, and shards) of ranks "
                f"0 to {self._comm.size - 1} in order, got {shape} of ranks {brief(ranks)}"
            )
        return mesh

    # ---- in

    def load_state_dict(self, state: Mapping[str, Any], strict: bool, assign: bool, options: Any) -> Any:
        """Load the module's state dict; see `ShardedModule.load_state_dict`."""
        if options is not None:
            strict = options.strict
            if options.broadcast_from_rank0:
                if not options.full_state_dict:
                    raise StepError(
                        "load_state_dict: broadcast_from_rank0 sends whole tensors; write "
                        "StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)"
                    )
                state = self._from_rank0(state)
        return self._module.load_state_dict(state, strict=strict, assign=assign)

    def _from_rank0(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Send rank 0's tensors to all, one after the other; of parameters each rank keeps its own part."""
        first = self._comm.rank == 0
        known = dict(self._module.named_parameters(remove_duplicate=False))
        # What is not a tensor (extra state) stays where it is, as with torch.
        tensors = {k: v for k, v in state.items() if isinstance(v, self._torch.Tensor)} if first else {}
        spread = [name for name, value in tensors.items() if hasattr(value, "full_tensor")]
        error = StepError(
            f"load_state_dict: broadcast_from_rank0 sends whole tensors, {spread[:1]} is a DTensor"
        )
        agree(self._comm, b"", error if spread else None, "load_state_dict")
        listed = [[k, list(v.shape), str(v.dtype).removeprefix("torch.")] for k, v in tensors.items()]
        found: dict[str, Any] = {}
        for name, shape, dtype in json.loads(share_text(self._comm.control, json.dumps(listed))[0]):
            whole = self._torch.empty(shape, dtype=getattr(self._torch, dtype))
            whole = tensors[name].detach().contiguous() if first else whole
            if whole.numel():
                self._comm.control.broadcast(whole.reshape(-1).view(self._torch.uint8).numpy(), 0)
            param = known.get(name)
            ours = id(param) in self._homes and tuple(shape) == self._shape(param)
            found[name] = self._parts(param, whole, own=not first) if ours else whole
        return found

    def _take(
        self, module: Module, state: dict[str, Any], prefix: str, metadata: Any, strict: bool, missing: list[str],
        unexpected: list[str], errors: list[str],
    ) -> None:  # fmt: skip
        """Load all sharded parameters in and below a module, all or none, and leave torch nothing to do for them.

        Collective: all ranks of the communicator come here with the same names.
        """
        params = {
            prefix + path: param
            for path, param in module.named_parameters(remove_duplicate=False)
            if id(param) in self._homes
        }
        values = {key: state[key] for key in params if key in state}
        open_ones = {key: value for key, value in values.items() if not hasattr(value, "_lowshard_loaded")}
        if self._within[id(module)] and not open_ones:
            self._within[id(module)] -= 1
            return
        self._within = Counter(id(m) for _, m in module.named_modules(remove_duplicate=False))
        self._within[id(module)] -= 1
        error = None
        if metadata.get("assign_to_params_buffers"):
            error = StepError(
                "load_state_dict: assign=True puts whole tensors in the place of sharded parameters; leave it out"
            )
        wrong = [text for key, param in params.items() if (text := self._fault(key, param, values.get(key)))]
        facts = [[key, hasattr(value, "full_tensor")] for key, value in values.items()]
        digest = text_digest(json.dumps([facts, wrong]))
        agree(self._comm, digest, error, f"load_state_dict of {len(values)} parameters")
        if wrong:
            errors.extend(wrong)
        elif values:
            parts = {
                self._homes[id(params[key])]: self._parts(params[key], value) for key, value in values.items()
            }
            self._engine.fill(lambda name, box: parts[name].boxes[box], names=parts)
        for key in values:
            # torch goes on to copy it: on itself, what a closed parameter holds is nothing.
            state[key] = params[key].detach()
            state[key]._lowshard_loaded = True

    def _fault(self, key: str, param: Tensor, value: Any) -> str | None:
        """Return what is wrong with a value, in torch's words, or None."""
        if value is None:
            return None
        shape = self._shape(param)
        if not isinstance(value, (self._torch.Tensor, Parts)):
            return f'While copying the parameter named "{key}", expected torch.Tensor, got {brief(value)}'
        if tuple(value.shape) != shape and not (not shape and tuple(value.shape) == (1,)):
            return (
                f"size mismatch for {key}: copying a param with shape {tuple(value.shape)} from checkpoint, the shape "
                f"in current model is {shape}."
            )
        return None

    def _shape(self, param: Tensor) -> tuple[int, ...]:
        _, segment, name = self._engine._find(self._homes[id(param)])
        assert segment is not None
        return segment.plan.by_name[name].shape

    def _parts(self, param: Tensor, value: Any, own: bool = False) -> Parts:
        """Return this rank's boxes of a whole parameter: views of it, or their own memory."""
        if isinstance(value, Parts):
            return value
        shape, name = self._shape(param), self._homes[id(param)]
        gathered = hasattr(value, "full_tensor")
        whole = (value.full_tensor() if gathered else value).detach().reshape(shape)
        boxes = {}
        for box in self._boxes()[name]:
            part = array_of(whole[tuple(slice(lo, hi) for lo, hi in box)])
            boxes[box] = part.copy() if own or gathered else part
        return Parts(shape, boxes)

    def _boxes(self) -> dict[str, list[Box]]:
        """Return the boxes that this rank holds, by the engine's full names."""
        found: dict[str, list[Box]] = defaultdict(list)
        for name, _, segment, piece, _ in self._engine._held():
            shape = segment.plan.by_name[piece.name].shape
            found[name] += [box for box, _, _ in flat_boxes(shape, piece.param_lo, piece.param_hi)]
        return found


def tensor_of(array: Array) -> Tensor:
    """Return a NumPy array as a tensor over the same memory."""
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def array_of(tensor: Tensor) -> np.ndarray:
    """Return a tensor as a NumPy array: over the same memory, where NumPy has its dtype."""
    found: np.ndarray = (
        tensor.float() if tensor.dtype.itemsize < 4 and tensor.is_floating_point() else tensor
    ).numpy()
    return found
