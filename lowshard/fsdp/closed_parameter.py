"""torch's parameter while a sharded model holds its values: what would see that it holds nothing raises."""

from __future__ import annotations

from functools import cache
from typing import Any, NoReturn

from lowshard.errors import StepError

NOT_PICKLED = (
    "a sharded module cannot be pickled or copied: its parameters lie in pieces on the ranks. Write `state = "
    "sharded.state_dict()` on all ranks and torch.save(state, path) on one, or sharded.engine.save(path) for the "
    "optimizer's state too"
)
_IN_ENGINE = (
    "the gradient of a sharded parameter is in the engine, not in param.grad: write sharded.engine.join(), then "
    "sharded.engine.clip(max_norm) in place of clip_grad_norm_, sharded.engine.update(lowshard.fsdp.AdamW(lr=...)) in "
    "place of optimizer.step(), sharded.engine.reset() in place of zero_grad() to drop it"
)


@cache
def closed_parameter(torch: Any) -> Any:
    """Return the class of parameters, made once, and watch the steps of torch's optimizers from now on."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    class ClosedParameter(torch.nn.Parameter):  # type: ignore[misc]
        """A parameter of a `ShardedModule`."""

        _lowshard_has_grad = staticmethod(bool)

        @property
        def grad(self) -> Any:
            """What autograd left here, which the module takes at once; else None."""
            found = torch.Tensor.grad.__get__(self)
            if found is None and self._lowshard_has_grad():
                raise StepError(_IN_ENGINE)
            return found

        @grad.setter
        def grad(self, value: Any) -> None:
            torch.Tensor.grad.__set__(self, value)

        def __reduce_ex__(self, protocol: Any) -> NoReturn:
            raise StepError(NOT_PICKLED)

        def __deepcopy__(self, memo: Any) -> NoReturn:
            raise StepError(NOT_PICKLED)

    def refuse(optimizer: Any, args: Any, kwargs: Any) -> None:
        if any(isinstance(p, ClosedParameter) for group in optimizer.param_groups for p in group["params"]):
            name = type(optimizer).__name__
            raise StepError(
                f"torch.optim.{name}.step(): the optimizer was given parameters of a ShardedModule, which hold "
                "nothing outside of their unit's use. Write `sharded.engine.join(); sharded.engine.update(rule); "
                "sharded.engine.broadcast_updated_params()` with rule = lowshard.fsdp.AdamW(lr=...), SGD(lr=...) or "
                "any function of a Slot"
            )

    register_optimizer_step_pre_hook(refuse)
    return ClosedParameter
