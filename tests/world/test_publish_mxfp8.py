"""Subscribers that store what comes through a transform: MXFP8, whole and by the blocks that changed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.reshard_cases import local_part, random_layout

import lowshard as ls
from lowshard import comm as lc
from lowshard import dtypes
from lowshard.errors import CommError, KernelError, LowshardError, PeerFailed, PlanError
from lowshard.kernels import MXFP8Tensor, SwizzledMXFP8, quantize_mxfp8, swizzle_scales
from lowshard.kernels.mxfp8_tensor import swizzled_bytes
from lowshard.reshard import MXFP8ReshardTransform, Publisher, ReshardTransform, Subscriber
from lowshard.reshard import version_target as module
from lowshard.reshard.tensor_layout import as_tensor_layout
from lowshard.reshard.version_wire import ConnectionLost

TOKEN = bytes(32)
ROWS, COLS = 48, 160


def _one(shape: tuple[int, ...] = (ROWS, COLS), dtype: str = "bfloat16") -> dict[str, ls.Layout]:
    return {"w": ls.Layout(ls.DeviceMesh((1,), ("x",)), shape, dtype, (ls.Replicated(),))}


def _room(rows: int, cols: int, swizzled: bool = False) -> Any:
    data = np.zeros((rows, cols), np.uint8)
    if swizzled:
        return SwizzledMXFP8(data, np.zeros(swizzled_bytes(rows, cols // 32), np.uint8))
    return MXFP8Tensor(data, np.zeros((rows, cols // 32), np.uint8))


def _same(held: Any, values: np.ndarray, mode: Any = "rceil") -> bool:
    """Say whether it is what the plain kernels make of all of it."""
    wanted = quantize_mxfp8(values, "e4m3", mode)
    scale = wanted.scale if held.scale.ndim == 2 else swizzle_scales(wanted.scale)
    return bool((held.data == wanted.data).all() and (held.scale == scale).all())


@pytest.fixture(params=["mapped", "streams"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("LOWSHARD_CROSS_MEMORY", "off" if request.param == "streams" else "auto")
    return str(request.param)


@pytest.fixture
def values(rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal((ROWS, COLS), np.float32).astype(dtypes.get("bfloat16").numpy)


@pytest.mark.parametrize("case", range(12))
def test_any_layout_gets_to_mxfp8_of_any_other(
    rng: np.random.Generator, tmp_path: Path, case: int, way: str
) -> None:
    """From any layout of one to three ranks to any of whole blocks; some tensors stay as they are."""
    ranks = rng.integers(1, 4, 2).tolist()
    shapes = [(int(rng.integers(1, 40)), 192 * int(rng.integers(1, 4))) for _ in range(3)]
    dtype = str(rng.choice(["bfloat16", "float32"]))
    kind = dtypes.get(dtype).numpy
    whole = {f"w{i}": rng.standard_normal(s, np.float32).astype(kind) for i, s in enumerate(shapes)}
    have = {n: random_layout(rng, a.shape, dtype, 0, ranks[0]) for n, a in whole.items()}
    mesh = ls.DeviceMesh((ranks[1],), ("x",))
    want = {
        n: as_tensor_layout(
            ls.Layout(
                mesh, a.shape, dtype, (ls.Sharded(int(rng.integers(2))) if rng.random() < 0.7 else ls.Replicated(),)
            )
        )
        for n, a in whole.items()
    }  # fmt: skip
    stored = ["w0", "w1"]
    published, taken = [threading.Event() for _ in range(4)], [threading.Event() for _ in range(4)]

    def publish(comm: Any) -> None:
        arrays = {n: local_part(x, comm.rank, whole[n]).copy() for n, x in have.items() if comm.rank in x}
        with Publisher(have, arrays, comm, address=f"unix:{tmp_path}/p", token=TOKEN) as publisher:
            for version in range(4):
                for n, array in arrays.items():
                    array[...] = local_part(have[n], comm.rank, whole[n])
                publisher.publish(version)
                comm.barrier()
                published[version].set()
                assert taken[version].wait(60)

    def subscribe(comm: Any) -> None:
        parts = {n: x.local_shape(comm.rank) for n, x in want.items() if comm.rank in x}
        rooms = {n: _room(*s, swizzled=n == "w1") for n, s in parts.items() if n in stored}
        out = {n: np.zeros(s, kind) for n, s in parts.items() if n not in stored}
        transform = MXFP8ReshardTransform(stored, rooms)
        with Subscriber(
            want, out, comm, address=f"unix:{tmp_path}/p", token=TOKEN, transform=transform
        ) as subscriber:
            for version in range(4):
                assert published[version].wait(60)
                assert subscriber.pull(20) == version
                assert sorted(subscriber.weights) == sorted(parts)
                for n, held in subscriber.weights.items():
                    mine = local_part(want[n], comm.rank, whole[n])
                    if n in stored:
                        assert _same(held, mine.astype(dtypes.get("bfloat16").numpy)), n
                    else:
                        assert held.tobytes() == mine.tobytes(), n
                comm.barrier()
                if comm.rank == 0:
                    for array in whole.values():
                        share = (0.01, 0.3, 1.0)[version % 3]
                        at = rng.random(array.shape) < share
                        array[at] = rng.standard_normal(int(at.sum())).astype(kind)
                    taken[version].set()
                comm.barrier()

    threads = [
        threading.Thread(target=lc.run_loopback, args=(ranks[0], publish)),
        threading.Thread(target=lc.run_loopback, args=(ranks[1], subscribe)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert taken[-1].is_set()


def test_a_transform_of_ones_own_that_takes_whole_boxes(tmp_path: Path, way: str, values: np.ndarray) -> None:
    """The four methods of Megatron's contract and a twin are enough; all of a tensor comes, whatever changed."""

    class Halved(ReshardTransform):
        def __init__(self) -> None:
            self.held = {"w": np.zeros((ROWS, COLS), np.float32)}

        def should_transform(self, param_name: str) -> bool:
            return param_name == "w"

        def prepare_recv(self, param_name: str, dst_slice: Any) -> list[Any]:
            return [np.empty_like(self.held["w"][dst_slice])]

        def finalize_recv(self, param_name: str, dst_slice: Any, recv_buffers: list[Any]) -> None:
            self.held["w"][dst_slice] = recv_buffers[0] / 2

        def refit_weights(self) -> dict[str, Any]:
            return self.held

        def twin(self) -> Halved:
            return Halved()

    address = f"unix:{tmp_path}/p"
    with (
        Publisher(_one(), {"w": values}, address=address) as publisher,
        Subscriber(_one(), {}, address=address, transform=Halved()) as subscriber,
    ):
        for version in range(4):
            publisher.publish(version)
            assert subscriber.pull(10) == version
            assert (subscriber.weights["w"] == values.astype(np.float32) / 2).all()
            assert subscriber.report()["received_bytes"] in (0, values.nbytes)
            values[version] += 1


def test_what_fails_amid_it_leaves_the_version_that_is_served(
    tmp_path: Path, way: str, values: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worst moments: the connection ends, or the transform does, when half a version has been stored."""
    address = f"unix:{tmp_path}/p"
    transform = MXFP8ReshardTransform(["w"], {"w": _room(ROWS, COLS)})
    real = module.StoredTarget.put
    with (
        Publisher(_one(), {"w": values}, address=address) as publisher,
        Subscriber(_one(), {}, address=address, transform=transform, delta="off") as subscriber,
    ):
        publisher.publish(0)
        assert subscriber.pull(10) == 0
        errors = ConnectionLost("cut"), KernelError("no room"), MemoryError("none")
        for version, error in enumerate(errors, 1):
            before = values.copy()
            values[...] = version
            publisher.publish(version)

            def half(self: Any, box: Any, came: Any, error: Exception = error) -> None:
                middle = (box[0][0] + box[0][1]) // 2
                real(self, ((box[0][0], middle), box[1]), came[: middle - box[0][0]])
                raise error

            with monkeypatch.context() as amid:
                amid.setattr(module.StoredTarget, "put", half)
                with pytest.raises(PeerFailed if isinstance(error, ConnectionLost) else CommError):
                    subscriber.pull(10)
            assert subscriber.version == version - 1
            assert _same(subscriber.weights["w"], before)
            assert subscriber.pull(10) == version
            assert _same(subscriber.weights["w"], values)


def test_a_transform_that_does_not_fit_is_refused_at_once(tmp_path: Path) -> None:
    """By name, on all ranks, before anything is connected."""
    mxfp8, room = MXFP8ReshardTransform, {"w": _room(ROWS, COLS)}
    for layouts, transform, text in (
        (_one(), "mxfp8", "got str"),
        (_one(), mxfp8(["w"]), "persistent_buffers"),
        (_one(), mxfp8(["w"], {"w": _room(ROWS, COLS - 32)}), "as it is published"),
        (_one(), mxfp8(["w"], room, convert_on_send=True), "convert_on_send"),
        (_one((4, 4, 32)), mxfp8(["w"], {"w": _room(4, 32)}), "matrices"),
        (_one(), mxfp8(["other"]), "no array of that name"),
    ):
        with pytest.raises(LowshardError, match=text):
            Subscriber(layouts, {}, address=f"unix:{tmp_path}/p", token=TOKEN, transform=transform)
    alone, out = (
        type("Alone", (ReshardTransform,), {})(),
        {"w": np.zeros((ROWS, COLS), dtypes.get("bfloat16").numpy)},
    )
    with pytest.raises(PlanError, match="twin"):
        Subscriber(_one(), out, address=f"unix:{tmp_path}/p", token=TOKEN, transform=alone)

    def one_of_two(comm: Any) -> None:
        layout = {"w": ls.Layout(ls.DeviceMesh((2,), ("x",)), (ROWS, COLS), "bfloat16", (ls.Replicated(),))}
        rooms = {"w": _room(ROWS, COLS)} if comm.rank else {}
        with pytest.raises(LowshardError, match="w is to be quantised"):
            Subscriber(
                layout, {}, comm, address=f"unix:{tmp_path}/p", token=TOKEN, transform=mxfp8(["w"], rooms)
            )

    lc.run_loopback(2, one_of_two)
