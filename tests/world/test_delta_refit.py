"""Refits that send what differs: bit for bit the versions that whole refits bring, at the bytes that were promised."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support import mode
from support.reshard_cases import BF16, LIMIT_S, arrays_of, held, local_part, random_case, weights

from lowshard.comm import run_loopback
from lowshard.errors import LowshardError, PlanError
from lowshard.kernels import quantize_mxfp8, unswizzle_scales
from lowshard.kernels.change_boxes import ScratchBuffer
from lowshard.kernels.changes import ChangeBoxes
from lowshard.reshard import (
    DimSharding,
    MXFP8ReshardTransform,
    Refit,
    ReshardPlan,
    TensorLayout,
    build_reshard_plan,
)


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    """Have kernels compiled beside no deadline."""
    for itemsize in (1, 2, 4, 8):
        for block in (1, 32) if itemsize in (2, 4) else (1,):
            array = np.zeros((2, 64 * itemsize), np.uint8).view(f"u{itemsize}")
            boxes = ChangeBoxes([((0, 2), (0, 64))], itemsize, block)
            boxes.write(array, boxes.find(array + array.dtype.type(1), array, ScratchBuffer(), False))


Versions = list[dict[str, np.ndarray]]
SHARES = (0, 0.001, 0.01, 0.05, 0.3, 0.6, 1)


def changed(rng: np.random.Generator, old: np.ndarray, share: float) -> np.ndarray:
    """Return a copy of which some elements have other bits."""
    new = old.copy()
    raw = new.reshape(-1).view(np.uint8).reshape(new.size, new.itemsize)
    picked = np.flatnonzero(rng.random(new.size) < share)
    raw[picked, rng.integers(new.itemsize, size=picked.size)] ^= 0x41
    return new


def versions_of(rng: np.random.Generator, first: dict[str, np.ndarray], count: int) -> Versions:
    """Return versions that follow each other, each tensor with its own share of elements that differ."""
    made = [first]
    for _ in range(count):
        made.append({n: changed(rng, a, float(rng.choice(SHARES))) for n, a in made[-1].items()})
    return made


def bits(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def promised(
    plan: ReshardPlan, case: Any, rank: int, old: dict[str, Any], new: dict[str, Any]
) -> tuple[int, int]:
    """Return, by slicing, the elements that differ in what a rank gives others, and the bytes that they may take."""
    elems, most = 0, 0.0
    local = {n: [local_part(x, rank, v[n]) for v in (old, new)] for n, x in case.src.items() if rank in x}
    for moves in plan.for_rank(rank).sends.values():
        for entry in {move.entry for move in moves}:
            before, after = local[plan.entries[entry].src_name]
            count, total = 0, 0
            for move in moves:
                if move.entry == entry:
                    at = (*(slice(*side) for side in move.src_box), ...)
                    raw = [np.ascontiguousarray(a[at]).reshape(-1).view(np.uint8) for a in (before, after)]
                    total += raw[0].size
                    count += int((raw[0] != raw[1]).reshape(-1, before.itemsize).any(axis=1).sum())
            elems += count
            most += min(count * (4 + before.itemsize), 1.02 * total) + 64
    return elems, int(most)


def test_every_version_is_that_of_slicing_and_takes_the_bytes_that_are_promised(
    rng: np.random.Generator,
) -> None:
    compared: list[int] = []
    while len(compared) < (10_000 if mode.full() else 400):
        case = random_case(rng)
        versions = versions_of(rng, case.whole, 4)
        buffering, checksums = str(rng.choice(["double", "in_place"])), bool(rng.random() < 0.5)
        way = str(rng.choice(["auto", "slots", "messages"]))
        skips = bool(rng.random() < 0.3)  # v0 to v2: what was not pushed is summed up
        direct = ReshardPlan(case.plan.entries, case.plan.node_size, False)

        def work(
            comm: Any, case: Any = case, versions: Versions = versions, buffering: Any = buffering, way: Any = way,
            checksums: bool = checksums, skips: bool = skips, direct: ReshardPlan = direct,
        ) -> None:  # fmt: skip
            mine = arrays_of(case.src, comm.rank, versions[0])
            out = {n: np.zeros_like(a) for n, a in arrays_of(case.dst, comm.rank, versions[0]).items()}
            with Refit(
                case.plan, comm, mine, out, buffering=buffering, way=way, checksums=checksums,
                staging_bytes=case.staging_bytes, delta="auto",
            ) as refit:  # fmt: skip
                last: dict[str, np.ndarray] | None = None
                own = direct.for_rank(comm.rank)
                groups = [e for moves in (*own.sends.values(), own.copies) for e in {m.entry for m in moves}]
                for number, whole in enumerate(versions):
                    if skips and number in (1, 3):
                        continue
                    for name, array in mine.items():
                        array[...] = local_part(case.src[name], comm.rank, whole[name])
                    refit.push(number) if mine else refit.pull()
                    for name, array in refit.weights.items():
                        assert bits(array) == bits(local_part(case.dst[name], comm.rank, whole[name])), name
                    said = refit.report()
                    assert said["dense_bytes"] == direct.sent_bytes(comm.rank)
                    if last is None:
                        assert said["sent_bytes"] == said["dense_bytes"]
                    else:
                        elems, most = promised(direct, case, comm.rank, last, whole)
                        assert said["changed_elems"] == elems
                        assert said["sent_bytes"] <= most
                        compared.extend(groups)
                    last = whole

        run_loopback(case.ranks, work, LIMIT_S)


@pytest.mark.parametrize("on_send", [False, True])
@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("buffering", ["double", "in_place"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_blocks_that_changed_are_quantised_as_the_whole_is(
    rng: np.random.Generator, on_send: bool, swizzled: bool, buffering: Any, dtype: str
) -> None:
    shape = (150, 192)
    rows = TensorLayout.sharded(shape, dtype, {"tp": (2, 1)}, {0: "tp"})
    odd = TensorLayout.sharded(
        shape, dtype, {"tp": (2, 1)}, {1: DimSharding(192, 2, points=(0, 70, 192))}, by={1: "tp"}
    )
    dst = TensorLayout.sharded(shape, dtype, {"dp": (2, 2), "tp": (2, 1)}, {1: "tp"}, offset=1)
    first = weights(rng, *shape).astype(np.float32 if dtype == "float32" else BF16)
    quantize_mxfp8(first.astype(BF16))  # compiled here, beside no deadline
    versions = versions_of(rng, {"w": first, "norm": weights(rng, 30, 4)}, 4)
    for number, share in enumerate((0.001, 0.0, 0.01, 0.2), 1):
        versions[number]["w"] = changed(rng, versions[number - 1]["w"], share)
    norm = TensorLayout.sharded((30, 4), "bfloat16", {"tp": (2, 1)}, {0: "tp"})
    for src in (rows, odd):
        plan = build_reshard_plan(
            {"w": src, "norm": norm},
            {"w": dst, "norm": TensorLayout.sharded((30, 4), "bfloat16", {"tp": (1, 1)}, offset=4)},
        )

        def work(comm: Any, src: Any = src, plan: Any = plan) -> None:
            mine = arrays_of({"w": src, "norm": norm}, comm.rank, versions[0])
            part = dst.local_shape(comm.rank)
            buffers = {} if part is None else {"w": held(*part, swizzled, "e4m3")}
            out = {"norm": np.zeros((30, 4), BF16)} if comm.rank == 4 else {}
            how = MXFP8ReshardTransform({"w"}, buffers, convert_on_send=on_send)
            sent = []
            with Refit(plan, comm, mine, out, how, buffering=buffering, delta="auto") as refit:
                for number, whole in enumerate(versions):
                    for name, layout in (("w", src), ("norm", norm)):
                        if name in mine:
                            mine[name][...] = local_part(layout, comm.rank, whole[name])
                    refit.push(number) if mine else refit.pull()
                    for name, got in refit.weights.items():
                        if name == "norm":
                            assert bits(got) == bits(whole["norm"])
                            continue
                        q = quantize_mxfp8(local_part(dst, comm.rank, whole["w"]).astype(BF16))
                        scale = unswizzle_scales(got.scale, *q.scale.shape) if swizzled else got.scale
                        assert bits(got.data) == bits(q.data)
                        assert bits(scale) == bits(q.scale)
                    sent.append((refit.report()["sent_bytes"], refit.report()["dense_bytes"]))
            assert sent[0][0] == sent[0][1]
            if mine and src is rows:  # boxes that begin within a block go whole
                assert all(few < 0.1 * whole for few, whole in sent[1:3]), sent

        run_loopback(5, work, LIMIT_S)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("buffering", ["double", "in_place"])
def test_sources_that_are_served_too_and_lie_over_each_other(
    rng: np.random.Generator, buffering: Any, tied: bool
) -> None:
    """A rank that serves its own sources, and one array behind two names: at the source, or fed from one source."""
    shape, c = (8, 48), "output_layer.weight"
    b = "embedding.word_embeddings.weight"  # which feeds the output layer that sources lack
    src = {n: TensorLayout.sharded(shape, "float32", {"tp": (2, 1)}, {0: "tp"}) for n in ("a", b, c)}
    dst = {"a": src["a"], **{n: TensorLayout.sharded(shape, "float32", {"dp": (2, 1)}) for n in (b, c)}}
    if tied:
        del src[c]
    plan = build_reshard_plan(src, dst)
    versions = versions_of(rng, {n: rng.standard_normal(shape).astype(np.float32) for n in ("a", b)}, 5)

    def work(comm: Any) -> None:
        mine = arrays_of({n: src[n] for n in ("a", b)}, comm.rank, versions[0])
        out = {"a": mine["a"], b: np.zeros(shape, np.float32), c: np.zeros(shape, np.float32)}
        if tied:
            out[c] = out[b]
        else:
            mine[c] = mine[b]
        with Refit(plan, comm, mine, out, buffering=buffering, delta="auto") as refit:
            for number, whole in enumerate(versions):
                for name in ("a", b):
                    mine[name][...] = local_part(src[name], comm.rank, whole[name])
                refit.push(number)
                assert bits(refit.weights["a"]) == bits(local_part(src["a"], comm.rank, whole["a"]))
                assert bits(mine["a"]) == bits(local_part(src["a"], comm.rank, whole["a"]))
                assert bits(refit.weights[b]) == bits(refit.weights[c]) == bits(whole[b])
                assert np.shares_memory(refit.weights[b], refit.weights[c]) == tied  # in both sets

    run_loopback(2, work, LIMIT_S)


@pytest.mark.parametrize("buffering", ["double", "in_place"])
@pytest.mark.parametrize("where", ["flip", "lie"])
def test_a_push_that_fails_leaves_the_old_version_and_the_next_one_is_right(
    rng: np.random.Generator, buffering: Any, where: str
) -> None:
    src = {n: TensorLayout.sharded((40, 64), "bfloat16", {"tp": (2, 1)}, {0: "tp"}) for n in ("a", "b")}
    dst = {n: TensorLayout.sharded((40, 64), "bfloat16", {"tp": (2, 1)}, {1: "tp"}, offset=2) for n in src}
    plan = build_reshard_plan(src, dst)
    versions = [{n: weights(rng, 40, 64) for n in src}]
    for _ in range(7):  # one tensor changes little, the other a lot: it goes whole
        versions.append({n: changed(rng, a, 0.002 if n == "a" else 0.9) for n, a in versions[-1].items()})
        versions[-1]["a"].view(np.uint16)[np.ix_((5, 25), (3, 40))] ^= (
            1  # something that each rank gives each other
        )

    def work(comm: Any) -> None:
        mine = arrays_of(src, comm.rank, versions[0])
        out = {n: np.zeros((40, 32), BF16) for n in dst} if comm.rank > 1 else {}
        refit = Refit(plan, comm, mine, out, buffering=buffering, delta="auto")
        changes = refit._changes
        assert changes is not None

        def push(number: int) -> None:
            for name, array in mine.items():
                array[...] = local_part(src[name], comm.rank, versions[number][name])
            refit.push(number) if mine else refit.pull()

        def serves(number: int) -> None:
            assert refit.version == number
            assert not refit.torn
            for name, got in refit.weights.items():
                assert bits(got) == bits(local_part(dst[name], comm.rank, versions[number][name]))

        for number in (0, 1, 2):
            push(number)
            serves(number)
        held = dict(vars(changes))
        if comm.rank == 1:
            if where == "flip":
                text_of = changes._find

                def flip(target: int, follows: bool) -> None:
                    text_of(target, follows)
                    for group in changes._sent_groups():
                        if group.sent.encoded is not None and group.sent.units:
                            group.sent.encoded[-1] ^= 0x80
                            group.sent.encoded[-2] ^= 0x80

                changes._find = flip  # type: ignore[method-assign]
            else:
                tell = changes._exchange_sizes

                def lie() -> Any:
                    for group in changes._sent_groups():
                        if group.sent.encoded is not None:
                            group.sent = group.sent._replace(gaps_bytes=group.sent.gaps_bytes + 1)
                    return tell()

                changes._exchange_sizes = lie  # type: ignore[method-assign]
        with pytest.raises(LowshardError):
            push(3)
        torn = buffering == "in_place" and refit.torn
        assert refit.version == 2
        if not torn:
            serves(2)
        for name in ("_find", "_exchange_sizes"):
            vars(changes).pop(name, None)
        assert vars(changes).keys() == held.keys()
        for number in (4, 5, 6, 7):
            push(number)
            serves(number)
            said = refit.report()
            if mine and (number > 4 or buffering == "double"):
                assert said["sent_bytes"] < 0.7 * said["dense_bytes"]  # a text again, of what its takers hold

    run_loopback(4, work, LIMIT_S)


def test_delta_that_ranks_do_not_agree_on_is_the_same_error_on_all() -> None:
    layout = {"w": TensorLayout.sharded((4,), "float32", {"tp": (2, 1)}, {0: "tp"})}
    plan = build_reshard_plan(layout, {"w": TensorLayout.sharded((4,), "float32", {"dp": (2, 1)})})

    def work(comm: Any) -> None:
        arrays = {"w": np.ones(2, np.float32)}, {"w": np.zeros(4, np.float32)}
        for wrong in ("sometimes", None, True, ["auto"]):
            with pytest.raises(PlanError, match="delta is 'off', 'auto' or 'always'"):
                Refit(plan, comm, *arrays, delta=wrong if comm.rank else "auto")  # type: ignore[arg-type]
        with pytest.raises(LowshardError, match="every rank asks for the same thing"):
            Refit(plan, comm, *arrays, delta="auto" if comm.rank else "off")

    run_loopback(2, work, LIMIT_S)
