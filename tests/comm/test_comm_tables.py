"""The table of collectives: what else speaks of a collective knows each of them."""

from __future__ import annotations

import inspect

from lowshard.bench.collective_case import OPERATIONS
from lowshard.comm import Communicator
from lowshard.comm.collectives import COLLECTIVES
from lowshard.comm.communicator import Starter
from lowshard.cost import OPS


def test_every_collective_has_a_method_a_started_form_a_price_and_a_benchmark() -> None:
    for name in COLLECTIVES:
        method, started = (inspect.signature(getattr(kind, name)) for kind in (Communicator, Starter))
        assert (method.parameters, started.return_annotation) == (started.parameters, "Work")
        assert name.removesuffix("_v") in OPS
        assert name in OPERATIONS or name == "all_gather_v"
