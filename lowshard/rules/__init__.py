"""MaxText's mesh-and-rule files, resolved exactly as MaxText does, and explained.

A rule file names the mesh axes and says, for each logical name of a dim (embed, mlp, vocab, ...), which of them
shard it. `load_rules` reads one, `RuleSet.mesh` makes the mesh, `RuleSet.layout` gives a tensor's layout. No array
is made and no device is used.
"""

from __future__ import annotations

from lowshard.document import Where
from lowshard.errors import RulesError
from lowshard.rules.axis_rule import Rule
from lowshard.rules.checkpoint_rules import checkpoint_layouts, name_tensors, tensor_layouts, unit_layouts
from lowshard.rules.finding import CheckReport, Finding
from lowshard.rules.golden import named_shardings
from lowshard.rules.loading import READY_MADE, load_rules, make_rules, parse_rules
from lowshard.rules.logical_tensor import LogicalTensor
from lowshard.rules.ruleset import RuleSet

__all__ = [
    "READY_MADE",
    "CheckReport",
    "Finding",
    "LogicalTensor",
    "Rule",
    "RuleSet",
    "RulesError",
    "Where",
    "checkpoint_layouts",
    "load_rules",
    "make_rules",
    "name_tensors",
    "named_shardings",
    "parse_rules",
    "tensor_layouts",
    "unit_layouts",
]


def __dir__() -> list[str]:
    return sorted(__all__)
