"""Resharding over threads: every way to move, transforms of one's own, errors on all ranks alike."""

from __future__ import annotations

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
    run_case,
)

from lowshard import DeviceMesh, Layout, Replicated, Sharded
from lowshard.comm import Communicator, run_loopback
from lowshard.errors import (
    BufferMismatchError,
    CommError,
    KernelError,
    MeshError,
    MismatchError,
)
from lowshard.kernels import MXFP8Tensor
from lowshard.reshard import (
    MXFP8ReshardTransform,
    Refit,
    Reshard,
    ReshardTransform,
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


def test_replicated_meshes_of_layouts_reshard(rng: np.random.Generator) -> None:
    mesh = DeviceMesh((2, 2), ("dp", "tp"))
    src = Layout(mesh, (6, 10), "int32", (Replicated(), Sharded(0)))
    dst = Layout(mesh, (6, 10), "int32", (Sharded(1), Sharded(0)))
    plan = build_reshard_plan({"w": src}, {"w": dst})
    whole = rng.integers(0, 99, (6, 10)).astype(np.int32)

    def work(comm: Any) -> None:
        (a, b), (p, q) = src.box(comm.rank), dst.box(comm.rank)
        out = np.zeros(dst.local_shape(comm.rank), np.int32)
        execute_reshard_plan(plan, {"w": whole[slice(*a), slice(*b)].copy()}, {"w": out}, comm)
        assert np.array_equal(out, whole[slice(*p), slice(*q)])

    run_loopback(4, work, LIMIT_S)


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


@pytest.mark.parametrize("kind", ["array", "buffer", "scale"])
@pytest.mark.parametrize(
    "make",
    [lambda plan, src, dst, comm, how: Refit(plan, comm, src, dst, how), Reshard, execute_reshard_plan],
)
def test_one_memory_behind_two_names_is_refused_unless_one_source_feeds_both(make: Any, kind: str) -> None:
    """Of arrays, and of what a transform stores in."""
    shape = (4, 64)
    names = (EMBEDDING, OUTPUT)
    whole = TensorLayout.sharded(shape, "bfloat16", {"tp": (1, 1)})
    wanted = dict.fromkeys(names, whole.shifted(1))
    apart, tied = (build_reshard_plan(dict.fromkeys(given, whole), wanted) for given in (names, names[:1]))

    def ranks(comm: Communicator) -> None:
        src = {n: np.full(shape, i + 1, BF16) for i, n in enumerate(names)} if comm.rank == 0 else None
        dst: dict[str, Any] = {}
        how = None
        if comm.rank == 1 and kind == "array":
            dst = dict.fromkeys(names, np.zeros(shape, BF16))
        elif comm.rank == 1:
            held = [MXFP8Tensor(np.zeros(shape, np.uint8), np.zeros((4, 2), np.uint8)) for _ in names]
            held[1] = held[0] if kind == "buffer" else MXFP8Tensor(held[1].data, held[0].scale)
            how = MXFP8ReshardTransform(names, dict(zip(names, held, strict=True)))
        with pytest.raises(BufferMismatchError, match=f"on rank 1 .*{EMBEDDING} and .*{OUTPUT} share memory"):
            make(apart, src, dst, comm, how)
        made = make(tied, src, dst, comm, how)
        if isinstance(made, Refit):
            for version in (1, 2):
                if src is None:
                    made.pull()
                    first, second = (made.weights[n] for n in names)
                    assert kind == "scale" or first is second
                else:
                    src[EMBEDDING][...] = version
                    made.push(version)

    run_loopback(2, ranks, LIMIT_S)


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
