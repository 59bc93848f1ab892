"""Checks of rules against a mesh, with the sizes that would fit."""

from __future__ import annotations

from lowshard.bounded import bounded_cache
from lowshard.errors import RulesError
from lowshard.mesh import DeviceMesh
from lowshard.nearest import nearest
from lowshard.rules.axis_rule import Rule, rules_error
from lowshard.rules.resolution import Resolution, Resolver


def check_bound(rule: Rule, mesh: DeviceMesh, parameter: str | None = None) -> None:
    """Raise RulesError if a rule that decides a weight's dim is invalid on the mesh."""
    of = f" (for tensor {parameter!r})" if parameter else ""
    for axis in rule.axes:
        if axis not in mesh.axis_names:
            raise rules_error(
                f"the mesh has no axis {axis!r}{of}; its axes are {', '.join(mesh.axis_names)}"
                f"{nearest(axis, mesh.axis_names, 1)}",
                rule=rule,
                axis=axis,
            )
    if rule.repeated_axis:
        raise rules_error(
            f"the target names the axis {rule.repeated_axis!r} twice{of}; an axis shards a tensor once",
            rule=rule,
            axis=rule.repeated_axis,
        )


def check_told(found: Resolution, resolver: Resolver, parameter: str | None = None) -> None:
    """Raise RulesError if a named dim is replicated without a rule for that."""
    for dim, (name, winner) in enumerate(zip(found.names, found.winners, strict=True)):
        if name is None or winner is not None:
            continue
        of = f"dim {dim} of {f'tensor {parameter!r}' if parameter else list(found.names)}"
        rules = resolver.rules_of(name)
        if not rules:
            raise rules_error(
                f"no rule is for the logical name {name!r} ({of}): MaxText replicates it without a word; write "
                f"[{name}, []] where that is meant",
                resolver.where,
            )
        blocked = next(a for a in resolver.trace(found.names).attempts if a.dim == dim)
        block = blocked.blocks[0]
        at = f" at {block.rule.where}" if block.rule.where else ""
        raise rules_error(
            f"every rule of {name!r} is blocked ({of}): {block.axis} already serves {found.names[block.dim]!r} by rule "
            f"{block.rule}{at}; MaxText replicates the dim without a word; end with [{name}, []] where that is meant",
            rule=blocked.rule,
            axis=block.axis,
        )


def indivisible(rule: Rule, mesh: DeviceMesh, extent: int, what: str) -> RulesError:
    """Return the error for a dim that a rule's axes do not divide, with the sizes that would."""
    cut = shards_text(rule, mesh)
    fit = fitting(rule, mesh, extent)
    return rules_error(
        f"{what} is {extent}, which {cut} do not divide; {fit}",
        rule=rule,
        axis=rule.axes[-1] if len(rule.axes) == 1 else max(rule.axes, key=mesh.axis_size),
    )


def shards_text(rule: Rule, mesh: DeviceMesh) -> str:
    """Return how many shards a rule makes, as text such as `fsdp=4 x expert=4 = 16 shards`; size-1 axes hidden."""
    sizes = [f"{a}={mesh.axis_size(a)}" for a in rule.axes if mesh.axis_size(a) > 1]
    product = f" = {mesh.axis_size(rule.axes)}" if len(sizes) > 1 else ""
    return f"{' x '.join(sizes)}{product} shards"


def fitting(rule: Rule, mesh: DeviceMesh, extent: int) -> str:
    """Return, as text, the largest size of each axis of a rule that still divides an extent."""
    total = mesh.axis_size(rule.axes)
    shards = largest_divisor(extent, total)
    ways = []
    for axis in rule.axes:
        rest = total // mesh.axis_size(axis)
        if mesh.axis_size(axis) > 1 and extent % rest == 0:
            ways.append(f"{axis}={largest_divisor(extent // rest, mesh.axis_size(axis))}")
    alone = f" ({' or '.join(ways)} with the others as they are)" if ways else ""
    return f"the most that fit are {shards} shards{alone}"


@bounded_cache(1 << 20)
def largest_divisor(extent: int, at_most: int) -> int:
    """Return the largest number <= `at_most` that divides an extent >= 1."""
    best, low = 1, 1  # 10^6 pairs of divisors at most: exact for every extent up to 10^12
    while low * low <= extent and low <= min(at_most, 10**6):
        if extent % low == 0:
            best = max(best, low, extent // low if extent // low <= at_most else 1)
        low += 1
    return best
