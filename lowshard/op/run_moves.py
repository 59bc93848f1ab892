"""Runs along one cut dim that change hands: what slices, joins and reshapes of a cut dim need. Nothing else moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from lowshard.box import Interval
from lowshard.op.op_part import Group, Part

Array = Any


@dataclass(frozen=True, slots=True)
class Run:
    """`length` indices of an operand's dim, from `source` on, that become those of the result from `target` on."""

    operand: int
    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class Held:
    """An operand along the dim: the local array as [outer, local, inner], and what each rank of the group holds."""

    array: Array
    intervals: Sequence[Interval]


def exchange(
    part: Part, group: Group, held: Sequence[Held], runs: Sequence[Run], wanted: Sequence[Interval]
) -> Array:
    """Return this rank's `wanted` interval of what the `runs` of `held` operands make, as [outer, local, inner]."""
    xp, me = part.xp, group.place
    outer, _, inner = held[0].array.shape
    dtype = held[0].array.dtype
    low, high = wanted[me]
    result = xp.empty((outer, high - low, inner), dtype)
    everyone = range(len(group.ranks))
    moved = [[_pieces(held, runs, src, wanted[dst]) for dst in everyone] for src in everyone]
    for operand, source, target, length in moved[me][me]:
        result[:, target : target + length] = held[operand].array[:, source : source + length]
    if not any(moved[src][dst] for src in everyone for dst in everyone if src != dst):
        return result
    gives = [[] if dst == me else moved[me][dst] for dst in everyone]
    takes = [[] if src == me else moved[src][me] for src in everyone]
    wide = outer * inner
    send_counts = [sum(p[3] for p in pieces) * wide for pieces in gives]
    recv_counts = [sum(p[3] for p in pieces) * wide for pieces in takes]
    send, recv = xp.empty(sum(send_counts), dtype), xp.empty(sum(recv_counts), dtype)
    at = 0
    for pieces in gives:
        for operand, source, _, length in pieces:
            size = length * wide
            send[at : at + size].reshape(outer, length, inner)[...] = held[operand].array[
                :, source : source + length
            ]
            at += size
    group.comm.all_to_all_v(send, send_counts, _starts(send_counts), recv, recv_counts, _starts(recv_counts))
    at = 0
    for pieces in takes:
        for _, _, target, length in pieces:
            size = length * wide
            result[:, target : target + length] = recv[at : at + size].reshape(outer, length, inner)
            at += size
    return result


def along(array: Array, dim: int, dims: int = 1) -> Array:
    """Return an array as [outer, dim, inner]; `dims` dims from `dim` on count as one."""
    shape = array.shape
    return array.reshape(prod(shape[:dim]), prod(shape[dim : dim + dims]), prod(shape[dim + dims :]))


def _pieces(
    held: Sequence[Held], runs: Sequence[Run], src: int, wanted: Interval
) -> list[tuple[int, int, int, int]]:
    """Return what rank `src` of the group has of the wanted interval: operand, local source, local target, length."""
    found = []
    for run in runs:
        have = held[run.operand].intervals[src]
        shift = run.target - run.source
        start = max(run.target, wanted[0], have[0] + shift)
        stop = min(run.target + run.length, wanted[1], have[1] + shift)
        if start < stop:
            found.append((run.operand, start - shift - have[0], start - wanted[0], stop - start))
    return found


def _starts(counts: Sequence[int]) -> list[int]:
    starts, at = [], 0
    for count in counts:
        starts.append(at)
        at += count
    return starts
