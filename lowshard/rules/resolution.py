"""Resolves logical names to a partition spec, with a trace.

The algorithm is flax's `logical_to_mesh_axes` (flax 0.12.8, linen/spmd.py) as MaxText uses it: the rules are tried in
file order, and a rule is applied whole or not at all. Sizes do not matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from lowshard.argument import items, quoted
from lowshard.document import Where
from lowshard.errors import RulesError
from lowshard.rules.axis_rule import Rule, rules_error

LogicalNames = tuple[str | None, ...]
SpecEntry = None | str | tuple[str, ...]
Spec = tuple[SpecEntry, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """Why a rule was not applied: an axis, and the dim and rule that use it already."""

    axis: str
    dim: int
    rule: Rule


@dataclass(frozen=True, slots=True)
class Attempt:
    """One rule that was tried for one dim."""

    rule: Rule
    dim: int
    outcome: Literal["won", "blocked", "too late"]
    """too late: an earlier rule had settled the dim."""
    blocks: tuple[Block, ...] = ()


@dataclass(frozen=True, slots=True)
class Resolution:
    """The spec of one list of logical names, and the rule behind each entry."""

    names: LogicalNames
    spec: Spec
    winners: tuple[Rule | None, ...]
    """For each dim the rule that decided it; None if none applied."""
    attempts: tuple[Attempt, ...] = ()
    """Every rule of these names in file order, where a trace was asked for."""


@dataclass(frozen=True, eq=False)
class Resolver:
    """A list of rules, indexed by name."""

    rules: tuple[Rule, ...]
    where: Where | None = None
    """The place of the list, for errors about no single rule."""
    _places: Mapping[str, tuple[int, ...]] = field(init=False, repr=False)
    _known: dict[LogicalNames, Resolution] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        places: dict[str, list[int]] = {}
        for place, rule in enumerate(self.rules):
            places.setdefault(rule.name, []).append(place)
        object.__setattr__(self, "_places", {name: tuple(p) for name, p in places.items()})

    def rules_of(self, name: str) -> tuple[Rule, ...]:
        """Return the rules of one logical name, in file order."""
        return tuple(self.rules[place] for place in self._places.get(name, ()))

    def resolve(self, names: Sequence[str | None]) -> Resolution:
        """Return the resolution of a tensor's logical names, one a dim; None stays whole."""
        found = None
        if isinstance(names, tuple):
            try:
                found = self._known.get(names)
            except TypeError:  # a list in it: reported by name below
                found = None
        if found is None:
            found = self._resolve(names, trace=False)
            if len(self._known) < 100_000:
                self._known[found.names] = found
        return found

    def trace(self, names: Sequence[str | None]) -> Resolution:
        """Return the resolution with every rule that was tried and its outcome; raises as `resolve`."""
        return self._resolve(names, trace=True)

    def _resolve(self, given: Sequence[str | None], *, trace: bool) -> Resolution:
        names = checked_names(given)
        dims = {name: dim for dim, name in enumerate(names) if name is not None}
        if len(dims) + names.count(None) != len(names):
            self._fail_on_a_repeated_name(names)
        winners: list[Rule | None] = [None] * len(names)
        holders: dict[str, tuple[int, Rule]] = {}
        attempts: list[Attempt] = []
        for place in sorted(chain.from_iterable(self._places.get(name, ()) for name in dims)):
            rule = self.rules[place]
            dim = dims[rule.name]
            if winners[dim] is not None:
                if trace:
                    attempts.append(Attempt(rule, dim, "too late"))
                continue
            if not holders.keys().isdisjoint(rule.axes):
                if trace:
                    blocks = tuple(Block(a, *holders[a]) for a in rule.axes if a in holders)
                    attempts.append(Attempt(rule, dim, "blocked", blocks))
                continue
            winners[dim] = rule
            holders.update(dict.fromkeys(rule.axes, (dim, rule)))
            if trace:
                attempts.append(Attempt(rule, dim, "won"))
        for winner in winners:
            if winner is not None and winner.fault:
                raise rules_error(winner.fault, rule=winner)
        spec = tuple(None if winner is None else winner.entry for winner in winners)
        return Resolution(names, spec, tuple(winners), tuple(attempts))

    def _fail_on_a_repeated_name(self, names: LogicalNames) -> None:
        name = next(n for i, n in enumerate(names) if n is not None and n in names[:i])
        places = self._places.get(str(name), ())
        raise rules_error(
            f"the logical name {name!r} stands on two dims of {quoted(list(names))}: one axis would shard both; "
            "give one of them another name, or None",
            None if places else self.where,
            rule=self.rules[places[0]] if places else None,
        )


def checked_names(names: Iterable[str | None]) -> LogicalNames:
    """Return logical names as a tuple, or raise RulesError where they are no names."""
    rule = "logical names are a sequence with a name or None for each dim, such as ('embed', None)"
    found: LogicalNames = items(names, rule, RulesError)
    for name in found:
        if name is not None and not isinstance(name, str):
            raise RulesError(f"a logical name is text or None, got {quoted(name)} in {quoted(list(found))}")
    return found


def without_axes(spec: Spec, keep: Iterable[str]) -> Spec:
    """Return a spec with only the axes in `keep`; an entry that loses them all becomes None."""
    kept = set(keep)
    out: list[SpecEntry] = []
    for entry in spec:
        axes = entry_axes(entry)
        left = tuple(a for a in axes if a in kept)
        out.append(left if len(left) > 1 else left[0] if left else None)
    return tuple(out)


def entry_axes(entry: SpecEntry) -> tuple[str, ...]:
    """Return the axes of a spec entry, outer first."""
    return () if entry is None else (entry,) if isinstance(entry, str) else entry
