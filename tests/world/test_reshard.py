"""Resharding over threads: every way to move, transforms of one's own, errors on all ranks alike."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import mode
from support.reshard_cases import (
    BF16,
    LIMIT_S,
    WAYS,
    arrays_of,
    gtp_pair,
    local_part,
    on_all,
    random_case,
    random_layout,
    run_case,
)

from lowshard import DeviceMesh, Layout, Sharded, dtypes, execute_all, plan_redistribute
from lowshard.comm import Communicator, run_loopback
from lowshard.errors import (
    BufferMismatchError,
    CommError,
    DTypeError,
    KernelError,
    MeshError,
    MismatchError,
    PlanError,
)
from lowshard.kernels import MXFP8Tensor, cast, quantize_mxfp8
from lowshard.reshard import (
    CastTransform,
    MXFP8ReshardTransform,
    Publisher,
    Refit,
    Reshard,
    ReshardTransform,
    Subscriber,
    TensorLayout,
    build_reshard_plan,
    execute_reshard_plan,
)

# ---- moving


def test_a_reshard_is_slicing_the_whole(rng: np.random.Generator) -> None:
    for _ in range(250 if mode.full() else 30):
        case = random_case(rng)
        moved = run_loopback(case.ranks, lambda comm, case=case: run_case(comm, case, False), LIMIT_S)
        assert [s for s, _ in moved] == [case.plan.sent_bytes(r) for r in range(case.ranks)]
        assert [r for _, r in moved] == [case.plan.received_bytes(r) for r in range(case.ranks)]


def test_gtp_pieces_come_with_their_padding_or_without(rng: np.random.Generator) -> None:
    for padded in [True, False] * (20 if mode.full() else 2):
        (there, given), (here, wanted) = gtp_pair(rng)
        plan, back = build_reshard_plan(there, here), build_reshard_plan(here, there)
        held = {r: x if padded else x[(x > 0).all(1)] for r, x in (given | wanted).items()}

        def work(
            comm: Communicator, plan: Any = plan, back: Any = back, held: Any = held, given: Any = given
        ) -> None:
            mine = held[comm.rank]
            out = {"w": np.minimum(mine, 0)}
            src, dst = ({"w": mine.copy()}, None) if comm.rank in given else (None, out)
            with Refit(plan, comm, src, dst, delta="auto") as refit:
                for version in range(3):
                    refit.push(version) if src else refit.pull()
                    assert src or np.array_equal(refit.weights["w"], np.where(mine > 0, mine + version, -1))
                    if src:
                        src["w"] += mine > 0
            execute_reshard_plan(back, None if src else {"w": mine}, out if src else None, comm)
            assert not src or np.array_equal(out["w"], mine)

        run_loopback(len(held), work, LIMIT_S)


@pytest.mark.parametrize("way", WAYS)
def test_staging_is_bounded_and_pools_and_idle_ranks_take_part(rng: np.random.Generator, way: str) -> None:
    src = {"w": TensorLayout.sharded((40, 64), "float32", {"tp": (2, 1)}, {0: "tp"})}
    pools = [
        {"w": TensorLayout.sharded((40, 64), "float32", {"tp": (2, 1)}, {1: "tp"}, offset=2)},
        {"w": TensorLayout.sharded((40, 64), "float32", {"tp": (1, 1)}, offset=5)},
    ]
    plan = build_reshard_plan(src, pools)
    whole = {"w": rng.standard_normal((40, 64)).astype(np.float32)}

    def work(comm: Any) -> Any:
        dst = {}
        for pool in pools:
            dst |= {n: np.zeros(a.shape, a.dtype) for n, a in arrays_of(pool, comm.rank, whole).items()}
        report = execute_reshard_plan(
            plan, arrays_of(src, comm.rank, whole), dst, comm, way=way, staging_bytes=4096
        )
        for pool in pools:
            if comm.rank in pool["w"]:
                assert np.array_equal(dst["w"], local_part(pool["w"], comm.rank, whole["w"]))
        return report

    reports = run_loopback(7, work, LIMIT_S)
    assert all(r.staging_bytes <= 4096 for r in reports)
    assert reports[4].sent_bytes == reports[4].received_bytes == 0  # idle
    assert sum(r.sent_bytes for r in reports) == 2 * 40 * 64 * 4


# ---- errors: the same on all ranks, before anything is written


def pair() -> Any:
    mesh = DeviceMesh((2,), ("tp",))
    return build_reshard_plan(
        {"w": Layout(mesh, (4, 4), "float32", (Sharded(0),))},
        {"w": Layout(mesh, (4, 4), "float32", (Sharded(1),))},
    )


@pytest.mark.parametrize(
    ("spoil", "error", "text"),
    [
        (lambda s, d: s.pop("w"), BufferMismatchError, "rank 1: w: rank 1 has a part of this source tensor"),
        (lambda s, d: d.pop("w"), BufferMismatchError, "part of this destination tensor"),
        (lambda s, d: s.update(w=s["w"].astype(np.float64)), BufferMismatchError, r"got float64\[2, 4\]"),
        (
            lambda s, d: d.update(w=d["w"].T),
            BufferMismatchError,
            r"float32\[4, 2\] of this destination.*\[2, 4\]",
        ),
        (lambda s, d: d["w"].setflags(write=False), BufferMismatchError, "read-only"),
    ],
)
def test_wrong_arrays_raise_on_all_ranks_before_a_write(spoil: Any, error: type, text: str) -> None:
    plan = pair()

    def work(comm: Any) -> None:
        src, dst = {"w": np.ones((2, 4), np.float32)}, {"w": np.zeros((4, 2), np.float32)}
        kept = dst["w"]
        if comm.rank == 1:
            spoil(src, dst)
        with pytest.raises(error, match=text):
            execute_reshard_plan(plan, src, dst, comm)
        assert not kept.any()

    run_loopback(2, work, LIMIT_S)


def test_a_destination_over_a_source_is_refused_unless_it_stays_as_it_is() -> None:
    layouts = [{"w": TensorLayout.sharded((4, 4), "float32", {"tp": (2, 1)}, {dim: "tp"})} for dim in (0, 1)]
    moved, kept = build_reshard_plan(*layouts), build_reshard_plan(layouts[0], layouts[0])

    def work(comm: Any) -> None:
        mine = np.arange(8, dtype=np.float32).reshape(2, 4) + 8 * comm.rank
        with pytest.raises(BufferMismatchError, match="rank 0: w: on rank 0 its destination shares memory"):
            execute_reshard_plan(moved, {"w": mine}, {"w": mine.reshape(4, 2)}, comm)
        execute_reshard_plan(kept, {"w": mine}, {"w": mine}, comm)
        assert np.array_equal(mine.reshape(-1), np.arange(8) + 8 * comm.rank)

    run_loopback(2, work, LIMIT_S)


EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


FED = {"a": "a", "b": "b", EMBEDDING: EMBEDDING, OUTPUT: EMBEDDING}
ROWS, COLS = (
    {n: TensorLayout.sharded((4, 64), "bfloat16", {"tp": (2, 1)}, {d: "tp"}) for n in FED} for d in (0, 1)
)


def carved(
    rng: np.random.Generator, call: str
) -> tuple[dict[str, Any], dict[str, Any], list[tuple[str, str]]]:
    """Return sources and destinations in one memory, mostly apart, and the names of those that a byte map finds not."""
    memory, slots, is_plain = np.zeros(12 * 512, np.uint8), iter(range(12)), call == "execute_all"

    def part(shape: tuple[int, int], dtype: Any, whole: bool = False, astray: float = 0.1) -> np.ndarray:
        at = 512 * (next(slots) if rng.random() >= astray else int(rng.integers(12)))
        rows = memory[at : at + 512].view(dtype).reshape(shape[0], -1)
        if whole:
            return rows.reshape(-1)[: shape[0] * shape[1]].reshape(shape)
        begin, step = [(0, 1), (shape[1], 1), (0, 2), (1, 2)][rng.integers(4 if dtype is BF16 else 2)]
        return rows[:, begin::step][:, : shape[1]]

    def map_of(arrays: list[np.ndarray]) -> np.ndarray:
        memory.fill(0)
        for array in arrays:
            array.view(f"u{array.itemsize}").fill((1 << 8 * array.itemsize) - 1)
        return memory != 0

    src = {n: part((2, 64), BF16, astray=0) for n in FED if is_plain or FED[n] == n}
    dst: dict[str, Any] = {}
    for name in FED:
        if not is_plain and rng.random() < 0.4:
            dst[name] = MXFP8Tensor(part((4, 32), np.uint8), part((4, 1), np.uint8))
        else:
            dst[name] = part((4, 32), BF16, is_plain)
        if dst and rng.random() < (0.4 if name == OUTPUT else 0.1):
            dst[name] = dst[list(dst)[rng.integers(len(dst))] if name != OUTPUT else EMBEDDING]
    held = {n: [a.data, a.scale] if isinstance(a, MXFP8Tensor) else [a] for n, a in dst.items()}
    maps = {n: map_of(a) for n, a in held.items()}
    sources = {} if call == "Subscriber" else {n: map_of([a]) for n, a in src.items()}
    wrong = [(a, b) for a, b in combinations(FED, 2) if (maps[a] & maps[b]).any()]
    # One source feeds both, and what they share is one array.
    if (EMBEDDING, OUTPUT) in wrong and not is_plain:
        pairs = [
            (a, b) for a, b in product(held[EMBEDDING], held[OUTPUT]) if (map_of([a]) & map_of([b])).any()
        ]
        if all(a.__array_interface__ == b.__array_interface__ for a, b in pairs):
            wrong.remove((EMBEDDING, OUTPUT))
    wrong += [(a, b) for a in maps for b, there in sources.items() if (maps[a] & there).any()]
    return src, dst, wrong + [(n, n) for n, x in held.items() if (map_of(x[:1]) & map_of(x[1:])).any()]


@pytest.mark.parametrize("call", ["execute_all", "execute_reshard_plan", "double", "in_place", "Subscriber"])
def test_what_shares_a_byte_is_refused_by_name_and_all_else_works(call: str, tmp_path: Path) -> None:
    """Of arrays, slices, buffers of data and scale, one array behind two names, and sources."""
    rng, outcomes = mode.rng(f"apart {call}"), Counter[bool]()
    whole = {n: rng.standard_normal((4, 64)).astype(BF16) for n in set(FED.values())}
    fed = {n: ROWS[n] for n in FED if call == "execute_all" or FED[n] == n}
    plan, mesh = build_reshard_plan(fed, COLS), DeviceMesh((2,), ("tp",))
    layouts = [Layout(mesh, (4, 64), "bfloat16", (Sharded(d),)) for d in (0, 1)]
    moves = dict.fromkeys(FED, plan_redistribute(*layouts))
    for _ in range(100 if mode.full() else 12):
        buffering: Any = ["double", "in_place"][rng.integers(2)]
        sets = [carved(rng, call) for _ in range(2)]
        wrong = [pair for _, _, found in sets for pair in found]

        def work(comm: Communicator, sets: Any = sets, buffering: Any = buffering) -> None:
            src, dst, _ = sets[comm.rank]
            arrays = {n: a for n, a in dst.items() if not isinstance(a, MXFP8Tensor)}
            buffers = {n: a for n, a in dst.items() if n not in arrays}
            how = MXFP8ReshardTransform(buffers, buffers) if buffers else None

            def write(version: int) -> None:
                for name, array in src.items():
                    array[...] = local_part(ROWS[name], comm.rank, whole[FED[name]]) * version

            def check(version: int, weights: Any) -> None:
                for name, got in weights.items():
                    right = local_part(COLS[name], comm.rank, whole[FED[name]]) * version
                    if name in buffers:
                        q = quantize_mxfp8(right)
                        assert np.array_equal(got.data, q.data)
                        assert np.array_equal(got.scale, q.scale)
                    else:
                        assert np.array_equal(got, right)

            write(1)
            if call == "execute_all":
                execute_all(moves, src, comm, arrays)
                check(1, arrays)
            elif call == "execute_reshard_plan":
                execute_reshard_plan(plan, src, arrays, comm, how)
                check(1, dst)
            elif call == "Subscriber":
                address = f"unix:{tmp_path}/p"
                mine = {n: local_part(ROWS[n], comm.rank, whole[n]) for n in fed}
                with (
                    Publisher(fed, mine, comm, address=address) as publisher,
                    Subscriber(
                        COLS, arrays, comm, address=address, transform=how, buffering=buffering
                    ) as subscriber,
                ):
                    for version in (1, 2, 3):
                        for name, array in mine.items():
                            array[...] = local_part(ROWS[name], comm.rank, whole[name]) * version
                        publisher.publish(version)
                        subscriber.pull()
                        check(version, subscriber.weights)
            else:
                with Refit(plan, comm, src, arrays, how, buffering=call) as refit:  # type: ignore[arg-type]
                    for version in (1, 2, 3):
                        write(version)
                        refit.push(version)
                        check(version, refit.weights)

        outcomes[not wrong] += 1
        if not wrong:
            run_loopback(2, work, LIMIT_S)
            continue
        with pytest.raises(BufferMismatchError, match=r"share|overlaps") as told:
            run_loopback(2, work, LIMIT_S)
        assert any(a in str(told.value) and b in str(told.value) for a, b in wrong)
    assert min(outcomes[True], outcomes[False]) > 1, outcomes


FLOATS = ("float32", "float16", "bfloat16")


@pytest.mark.parametrize("call", ["execute_reshard_plan", "off", "auto", "memory", "connection"])
def test_what_is_cast_on_the_way_has_the_bits_of_cast(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any layouts and float dtypes, slices, on either side; tensors of one dtype on both sides stay as they are."""
    monkeypatch.setenv("LOWSHARD_CROSS_MEMORY", "off" if call == "connection" else "auto")
    rng, names = mode.rng(f"cast {call}"), ("a", "b", "c", "i")
    for case in range(40 if mode.full() else 8):
        to, have, want = FLOATS[case % 3], int(rng.integers(1, 4)), int(rng.integers(1, 4))
        first, on_send = int(rng.integers(0, have + 1)), bool(case % 2)
        if call in ("memory", "connection"):
            want, first = have, 0
        dtypes_ = {n: "int32" if n == "i" else FLOATS[rng.integers(3)] for n in names}
        src, dst, whole = {}, {}, {}
        for name, dtype in dtypes_.items():
            shape = tuple(rng.integers(1, 40, int(rng.integers(0, 3))).tolist())
            src[name] = random_layout(rng, shape, dtype, 0, have)
            dst[name] = random_layout(rng, shape, dtype if name in "ci" else to, first, want)
            values = rng.standard_normal(shape) * 10.0 ** rng.integers(-45, 39, shape)
            with np.errstate(all="ignore"):
                whole[name] = np.asarray(values).astype(dtypes.get(dtype).numpy).reshape(shape)
        # layouts say what each side holds; a plan of one dtype also takes arrays that are cast from it, or to it
        one = 0 if call in ("memory", "connection") else int(rng.integers(3))
        plan = build_reshard_plan(
            {n: replace(x, dtype=to) if one == 1 and n in "ab" else x for n, x in src.items()},
            {n: replace(x, dtype=src[n].dtype) if one == 2 else x for n, x in dst.items()},
        )
        how, buffering = CastTransform(to, on_send), ["double", "in_place"][case // 2 % 2]
        versions = [whole, {n: np.where(rng.random(a.shape) < 0.1, -a, a) for n, a in whole.items()}]
        versions.append(versions[1])

        way = WAYS[case % 3]

        def work(
            comm: Communicator, args: Any = (src, dst, versions, plan, how, buffering, one, way)
        ) -> None:
            src, dst, versions, plan, how, buffering, one, way = args
            mine = arrays_of(src, comm.rank, versions[0])
            out = {n: np.zeros((*x.local_shape(comm.rank), 2), dtypes.get(x.dtype).numpy)[..., 0]
                   for n, x in dst.items() if comm.rank in x}  # fmt: skip

            def give(version: int) -> int:
                for name, array in mine.items():
                    array[...] = local_part(src[name], comm.rank, versions[version][name])
                return version

            def check(got: Any, version: int = 0) -> None:
                for name, array in got.items():
                    right = local_part(dst[name], comm.rank, versions[version][name])
                    right = right if right.dtype == array.dtype else cast(right, array.dtype)
                    assert array.tobytes() == right.tobytes()

            if call == "execute_reshard_plan":
                sent = execute_reshard_plan(plan, mine, out, comm, how, way=way).sent_bytes
                assert sent == plan.sent_bytes(comm.rank) or not how.convert_on_send or one == 1
                check(out)
            elif call in ("off", "auto"):
                with Refit(plan, comm, mine, out, how, buffering=buffering, delta=call) as refit:
                    for version in range(3):
                        refit.push(give(version))
                        check(refit.weights, version)
                    is_whole = call == "off" or one == 2 or not how.convert_on_send
                    assert is_whole or not refit.report()["changed_elems"]
            else:
                address = f"unix:{tmp_path}/p"
                with (
                    Publisher(src, mine, comm, address=address) as publisher,
                    Subscriber(
                        dst, out, comm, address=address, transform=how, buffering=buffering
                    ) as subscriber,
                ):
                    for version in range(3):
                        publisher.publish(give(version))
                        subscriber.pull()
                        check(subscriber.weights, version)

        run_loopback(max(have, first + want), work, LIMIT_S)


def test_sides_of_two_dtypes_need_a_cast(tmp_path: Path) -> None:
    half, address = TensorLayout.sharded((4,), "bfloat16", {}), f"unix:{tmp_path}/p"
    src, dst = {"w": replace(half, dtype="float32")}, {"w": half}
    plan, mine, out = build_reshard_plan(src, dst), {"w": np.ones(4, np.float32)}, {"w": np.zeros(4, BF16)}

    def work(comm: Communicator) -> None:
        for how in (None, CastTransform("float16")):
            with pytest.raises(PlanError, match=r"w: .* pass transform=CastTransform\('bfloat16'\)"):
                execute_reshard_plan(plan, mine, out, comm, how)
        with pytest.raises(BufferMismatchError, match="holds bfloat16"):
            execute_reshard_plan(plan, mine, {"w": np.zeros(4, np.float32)}, comm, CastTransform("bfloat16"))

    run_loopback(1, work, LIMIT_S)
    with (
        Publisher(src, mine, address=address) as publisher,
        Subscriber(dst, out, address=address) as subscriber,
    ):
        publisher.publish(1)
        with pytest.raises(PlanError, match="CastTransform"):
            subscriber.pull(5)
    with pytest.raises(DTypeError, match="gives bfloat16"):
        CastTransform("int8")
    with pytest.raises(PlanError, match="one dtype on both sides"):
        build_reshard_plan({"w": replace(half, dtype="int32")}, dst)


def test_plans_and_worlds_that_differ_raise_on_all_ranks() -> None:
    other = build_reshard_plan(*({"v": TensorLayout.sharded((2,), "float32", {})},) * 2)
    errors = on_all(2, lambda c: Reshard(other if c.rank else pair(), *arrays(c), c))
    assert all(isinstance(e, MismatchError) for e in errors)
    wide = build_reshard_plan(
        {"w": TensorLayout.sharded((2,), "float32", {})},
        {"w": TensorLayout.sharded((2,), "float32", {}, offset=5)},
    )
    errors = on_all(2, lambda c: Reshard(wide, {"w": np.ones(2, np.float32)}, None, c))
    assert all(isinstance(e, MeshError) and "start 6" in str(e) for e in errors)


def arrays(comm: Any) -> tuple[dict, dict]:
    found = {"w": np.ones((2, 4), np.float32), "v": np.ones(2, np.float32)}
    return found, {"w": np.zeros((4, 2), np.float32), "v": np.zeros(2, np.float32)}


class Doubling(ReshardTransform):
    """Sends halves of two; counts its calls."""

    def __init__(self, arrays: int) -> None:
        self.arrays, self.calls = arrays, {"send": 0, "recv": 0, "finalize": 0}

    def should_transform(self, param_name: str) -> bool:
        return True

    def prepare_send(self, param_name: str, src_slice: Any, src_param: Any) -> list[Any]:
        self.calls["send"] += 1
        return [(src_param[src_slice] / self.arrays).copy() for _ in range(self.arrays)]

    def prepare_recv(self, param_name: str, dst_slice: Any) -> list[Any]:
        self.calls["recv"] += 1
        shape = tuple(s.stop - s.start for s in dst_slice)
        return [np.zeros(shape, np.float32) for _ in range(self.arrays)]

    def finalize_recv(self, param_name: str, dst_slice: Any, recv_buffers: list[Any]) -> None:
        self.calls["finalize"] += 1
        self.result = getattr(self, "result", np.zeros((4, 2), np.float32))
        self.result[dst_slice] = sum(recv_buffers)


@pytest.mark.parametrize("way", WAYS)
def test_a_transform_of_ones_own_is_called_once_a_box(way: str) -> None:
    plan = pair()

    def work(comm: Any) -> None:
        how = Doubling(2)
        src = {"w": np.arange(8, dtype=np.float32).reshape(2, 4) + 8 * comm.rank}
        execute_reshard_plan(plan, src, {}, comm, how, way=way)
        assert how.calls == {"send": 2, "recv": 2, "finalize": 2}  # one box stays, one goes
        whole = np.arange(16, dtype=np.float32).reshape(4, 4)
        assert np.array_equal(how.result, whole[:, 2 * comm.rank : 2 * comm.rank + 2])

    run_loopback(2, work, LIMIT_S)


def test_unequal_counts_raise_on_both_sides_before_a_byte_moves() -> None:
    src = {"w": TensorLayout.sharded((4, 2), "float32", {})}
    dst = {"w": TensorLayout.sharded((4, 2), "float32", {}, offset=1)}
    plan = build_reshard_plan(src, dst)
    hows = [Doubling(2), Doubling(3)]
    errors = on_all(
        2,
        lambda c: Reshard(
            plan, {"w": np.ones((4, 2), np.float32)} if not c.rank else {}, {}, c, hows[c.rank]
        ),
    )
    assert all(isinstance(e, MismatchError) for e in errors)
    assert all("sends 2 arrays for 1 boxes to rank 1, which makes room for 3" in str(e) for e in errors)
    assert hows[1].calls["finalize"] == 0


def test_an_error_of_a_transform_is_raised_on_all_ranks_and_the_next_run_works() -> None:
    plan = pair()

    class Failing(Doubling):
        fails = True

        def finalize_recv(self, param_name: str, dst_slice: Any, recv_buffers: list[Any]) -> None:
            if self.fails:
                raise KernelError("no room")
            super().finalize_recv(param_name, dst_slice, recv_buffers)

    def work(comm: Any) -> None:
        how = Failing(1)
        how.fails = comm.rank == 1
        made = Reshard(plan, {"w": np.ones((2, 4), np.float32)}, {}, comm, how)
        with pytest.raises(KernelError, match="rank 1: no room"):
            made.run()
        how.fails = False
        made.run()
        assert (how.result == 1).all()

    run_loopback(2, work, LIMIT_S)


@pytest.mark.parametrize("way", ["slots", "messages", "a second set"])
@pytest.mark.parametrize("short", [0, 1])
def test_a_rank_without_memory_is_said_on_all_ranks(way: Any, short: int) -> None:
    plan = pair()

    def make(comm: Any) -> None:
        if comm.rank == short:

            def empty(shape: Any, dtype: Any = "float32") -> Any:
                raise MemoryError(f"no {shape} bytes")

            comm.empty = empty
        src, dst = {"w": np.ones((2, 4), np.float32)}, {"w": np.zeros((4, 2), np.float32)}
        Refit(plan, comm, src, dst) if way == "a second set" else Reshard(plan, src, dst, comm, way=way)

    errors = on_all(2, make)
    assert all(isinstance(e, CommError) and f"rank {short}: there is no memory for" in str(e) for e in errors)
