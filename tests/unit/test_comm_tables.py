"""The tables of collectives and transports: whole, and what else speaks of a collective knows each of them."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path

from lowshard import comm as lc
from lowshard.bench.collective_case import OPERATIONS
from lowshard.comm import Communicator
from lowshard.comm.collectives import COLLECTIVES
from lowshard.comm.communicator import Starter
from lowshard.comm.transport import Transport
from lowshard.comm.transports import TRANSPORTS, capabilities
from lowshard.cost import OPS

HOME = Path(lc.__file__).parent


def test_every_transport_of_the_package_is_in_the_table() -> None:
    listed = {entry.load() for entry in TRANSPORTS}
    for path in HOME.rglob("*.py"):
        if "(Transport)" in path.read_text(encoding="utf-8"):
            import_module("lowshard.comm." + ".".join(path.relative_to(HOME).with_suffix("").parts))
    assert {kind for kind in Transport.__subclasses__() if kind.__module__.startswith("lowshard.")} == listed


def test_transports_have_plans_of_collectives_of_the_table_alone() -> None:
    for entry in TRANSPORTS:
        kind = entry.load()
        assert kind.plans.keys() <= COLLECTIVES.keys()
    assert dict((kind, own) for kind, _, own in capabilities())["LoopbackTransport"] == []


def test_every_collective_has_a_method_a_started_form_a_price_and_a_benchmark() -> None:
    for name in COLLECTIVES:
        method, started = (inspect.signature(getattr(kind, name)) for kind in (Communicator, Starter))
        assert (method.parameters, started.return_annotation) == (started.parameters, "Work")
        assert name.removesuffix("_v") in OPS
        assert name in OPERATIONS or name == "all_gather_v"
