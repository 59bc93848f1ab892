"""Which blocks of an array differ from what their digests say, found in one pass that reads the array once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir

from lowshard.compiled import INT, Signature, load_compiled
from lowshard.compiled.deferred import intrinsic, types
from lowshard.compiled.emitted import copy_bytes
from lowshard.kernels.cpu.cpu_changes import GAPS, HIT, LENGTHS, MAY_STOP, STOPPED, TOTAL, VALUES, put_run
from lowshard.kernels.cpu.drive import COLUMNS, outer_dims, source_digest
from lowshard.kernels.cpu.memory_steps import load, load_u64, prefetch, store_value
from lowshard.kernels.runs import RUN, SRC_OFFSET

_GROUP = 32
"""Blocks whose digests are made before what was found is written: no branch depends on what they hold."""
FIND_SCRATCH_BYTES = 8 * (_GROUP + 1)
_ROW_BYTES, _AHEAD_BYTES = 64 << 10, 4 << 10
"""As in `cpu_changes`."""
_WORD_BITS = 64
_WIDE = ir.IntType(2 * _WORD_BITS)


@intrinsic(prefer_literal=True)
def _digest(typingctx: Any, block: Any, key: Any, lines: Any) -> Any:
    """Return the digest of a block of so many cache lines, a literal: see `block_digests`."""
    count = 8 * lines.literal_value

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        def word(base: ir.Value, number: int) -> ir.Value:
            return load(builder, base, _WORD_BITS, 0, 8 * number).value

        def wide(value: ir.Value) -> ir.Value:
            return builder.zext(value, _WIDE)

        block, key = args[:2]
        total = _WIDE(0)
        for j in range(0, count, 2):
            pair = [builder.add(word(block, i), word(key, i)) for i in (j, j + 1)]
            total = builder.add(total, builder.mul(wide(pair[0]), wide(pair[1])))
        low = wide(builder.trunc(total, ir.IntType(_WORD_BITS)))
        high = builder.lshr(total, _WIDE(_WORD_BITS))
        a, b = (load(builder, key, 2 * _WORD_BITS, 0, 8 * (count + i)).value for i in (0, 2))
        folded = builder.add(builder.mul(low, a), builder.mul(high, b))
        return builder.trunc(builder.lshr(folded, _WIDE(_WORD_BITS)), ir.IntType(_WORD_BITS))

    return types.uint64(types.int64, types.int64, lines), codegen


@cache
def digest_kernel(lines: int) -> Callable[..., None]:
    """Return `kernel(columns, new, key, digests, gaps, lengths, values, state, scratch)`.

    `columns` are a run table's in blocks of so many cache lines; all but it and `state`, which is as `find_kernel`'s,
    are addresses. The digests are compared with those of the blocks and made theirs. A search that has stopped, or is
    to write nothing (STOPPED is set before), goes on with the digests. It does not guess by how an array begins, since
    it cannot be done again.
    """
    block_bytes, group, row_bytes, ahead_bytes = 64 * lines, _GROUP, _ROW_BYTES, _AHEAD_BYTES

    def find(
        columns: Any,
        new: int,
        key: int,
        digests: int,
        gaps: int,
        lengths: int,
        values: int,
        state: Any,
        scratch: int,
    ) -> None:
        gaps_at, lengths_at, values_at = gaps, lengths, values
        begin, end, before, position, hit = 0, 0, 0, 0, 0
        total, may_stop, stopped = state[TOTAL], state[MAY_STOP] != 0, state[STOPPED] != 0
        for box in range(columns.shape[1]):
            n1, n2, n3, n4, s1, s2, s3, s4, _, _, _, _ = outer_dims(columns, box)
            blocks = columns[RUN, box]
            asks = n1 > 1 and blocks * block_bytes <= row_bytes
            rows_on = 1 + ahead_bytes // max(1, blocks * block_bytes)
            for row in range(n1 * n2 * n3 * n4):
                i1, rest = row % n1, row // n1
                i2, rest = rest % n2, rest // n2
                i3, i4 = rest % n3, rest // n3
                at = new + columns[SRC_OFFSET, box] + i1 * s1 + i2 * s2 + i3 * s3 + i4 * s4
                done = 0
                while done < blocks:
                    count, found = min(group, blocks - done), 0
                    for number in range(count):
                        block, kept = at + number * block_bytes, digests + 8 * (position + number)
                        if asks:
                            prefetch(block + s1 * rows_on)
                        made = _digest(block, key, lines)
                        store_value(scratch + 8 * found, types.uint64(number))
                        found += made != load_u64(kept)
                        store_value(kept, made)
                    hit += found
                    if not stopped:
                        for k in range(found):
                            number = types.int64(load_u64(scratch + 8 * k))
                            if position + number != end:
                                gaps_at, lengths_at = put_run(gaps_at, lengths_at, begin, end, before)
                                before = end
                                begin = end = position + number
                            end += 1
                            copy_bytes(values_at, at + number * block_bytes, block_bytes)
                            values_at += block_bytes
                    at += count * block_bytes
                    done += count
                    position += count
                    if may_stop and not stopped:
                        written = values_at - values + gaps_at - gaps + lengths_at - lengths
                        stopped = 8 * written > 7 * total * block_bytes
        gaps_at, lengths_at = put_run(gaps_at, lengths_at, begin, end, before)
        state[GAPS], state[LENGTHS], state[VALUES] = gaps_at - gaps, lengths_at - lengths, values_at - values
        state[HIT], state[STOPPED] = hit, 1 if stopped else 0

    return load_compiled(
        f"digest_blocks_{lines}_{source_digest()}",
        lambda: find,
        Signature((COLUMNS, *(INT,) * 6, "int64[1]", INT), "void"),
    )
