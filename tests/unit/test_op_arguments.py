"""The names of op arguments: those of the published table are taken, and one that nobody reads is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from support.op_samples import SAMPLES
from support.recorded import oracle

from lowshard import DeviceMesh, Layout, Replicated
from lowshard.errors import LayoutError
from lowshard.op import unsharded
from lowshard.op.op_part import KERNELS, Part, run_kernel
from lowshard.solver import action_set, pick
from lowshard.solver.table import RULES, Call, check_names, offer

ONE = DeviceMesh((1,), ("one",))
ORACLE: dict[str, Any] = oracle("max_greedy")
ITEM = {1: "int8", 2: "float16", 4: "float32", 8: "float64"}


def whole(shape: Any, dtype: str = "float32") -> Layout:
    return Layout(ONE, shape, dtype, (Replicated(),))


X = whole((2, 3))


class Recorded(Mapping[str, Any]):
    """Arguments that remember which names were asked for."""

    def __init__(self, held: Mapping[str, Any]) -> None:
        self.held, self.asked = held, set[str]()

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        return self.held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


@pytest.mark.parametrize("rules", ["documented", "extended"])
def test_every_argument_of_the_published_table_is_taken(rules: Any) -> None:
    steps = [step for chain in ORACLE["chains"] for step in chain.get("steps", ())]
    for case in (*ORACLE["cases"], *steps):
        check_names(case["op"], case.get("args", {}))
    for case in ORACLE["cases"]:
        layouts = [whole(given["shape"], ITEM[given.get("itemsize", 4)]) for given in case["inputs"]]
        action_set(case["op"], layouts, rules, **case["args"])


@pytest.mark.parametrize("rules", ["documented", "extended"])
@pytest.mark.parametrize(
    ("op", "layouts", "args", "text"),
    [
        ("softmax", [X], {"dim": 0}, "softmax has no argument 'dim'; its arguments are axis"),
        ("sum", [X], {"axes": 0}, "did you mean axis"),
        ("embedding", [X, whole((5,), "int64")], {"axis": 1}, "'axis'"),
    ],
)
def test_an_argument_that_an_op_does_not_have_is_refused(
    op: str, layouts: list[Layout], args: dict[str, Any], text: str, rules: Any
) -> None:
    for call in (pick, action_set):
        with pytest.raises(LayoutError, match=text):
            call(op, layouts, rules=rules, **args)


def test_an_op_is_not_run_with_an_argument_it_does_not_have() -> None:
    with pytest.raises(LayoutError, match="softmax has no argument 'dim'"):
        unsharded("softmax", np.zeros((2, 3), np.float32), dim=0)
    x, w = np.zeros((1, 4, 4, 2), np.float32), np.zeros((3, 3, 2, 2), np.float32)
    unsharded("conv2d_transpose", x, w, groups=1)
    with pytest.raises(LayoutError, match="conv2d_transpose: groups is 1, got 2"):
        unsharded("conv2d_transpose", x, w, groups=2)


@pytest.mark.parametrize("op", sorted(KERNELS))
def test_what_a_rule_and_a_kernel_read_is_what_the_op_has(op: str, rng: np.random.Generator) -> None:
    known, asked = RULES[op].args, set[str]()
    assert known is not None
    for _ in range(4):
        arrays, args = SAMPLES[op](rng)
        layouts = tuple(whole(x.shape, str(x.dtype)) for x in arrays)
        for extended in (False, True):
            recorded = Recorded(args)
            offer(Call(op, layouts, recorded, extended))
            asked |= recorded.asked
        offered = action_set(op, layouts, **args)
        part = Part(offered.action([offered.axis_assignments[0]]), 0, None, np)
        reads = part.args = Recorded(part.args)  # type: ignore[assignment]
        run_kernel(part, *arrays)
        asked |= reads.asked
    assert asked <= set(known)
