"""Publishers and subscribers of arrays on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.comm_kit import get, refused
from support.gpu import Answers, busy

import lowshard as ls
from lowshard import dtypes
from lowshard.errors import CommError
from lowshard.kernels import MXFP8Tensor, SwizzledMXFP8, quantize_mxfp8, swizzle_scales
from lowshard.kernels.mxfp8_tensor import swizzled_bytes
from lowshard.reshard import MXFP8ReshardTransform, Publisher, Subscriber
from lowshard.transfer import device_copies

TOKEN = bytes(32)


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_copies, "SLOT_BYTES", 8192)  # several rounds for a few rows


def put(values: np.ndarray) -> Any:
    """Return a copy on the GPU; of fp8, as integers."""
    import cupy

    return cupy.asarray(
        np.array(values.view(np.uint8) if dtypes.get(values.dtype).bits == 8 else values, order="C")
    )


def empty(shape: tuple[int, ...], dtype: str) -> Any:
    return put(np.zeros(shape, dtypes.get(dtype).numpy))


@pytest.fixture(params=["mapped", "streams"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("LOWSHARD_CROSS_MEMORY", "off" if request.param == "streams" else "auto")
    return str(request.param)


def _one(shape: tuple[int, ...], dtype: str) -> dict[str, ls.Layout]:
    return {"w": ls.Layout(ls.DeviceMesh((1,), ("x",)), shape, dtype, (ls.Replicated(),))}


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    kind = dtypes.get(dtype).numpy
    raw = rng.integers(0, 256, (*shape, kind.itemsize), np.uint8)
    return raw.view(kind)[..., 0] if shape else raw.view(kind)[0]


def _bits(values: Any) -> bytes:
    return get(values).tobytes()


def _change(rng: np.random.Generator, values: np.ndarray, count: int) -> None:
    at = rng.choice(values.size, count, replace=False)
    values.view(f"u{values.itemsize}").reshape(-1)[at] ^= 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "uint8", "float8_e4m3fn"])
def test_versions_go_from_a_gpu_to_a_gpu(
    tmp_path: Path, rng: np.random.Generator, way: str, dtype: str
) -> None:
    """Whole, and what changed: bits of any kind, through slots that are smaller than the array."""
    values, layout = _random(rng, (90, 150), dtype), _one((90, 150), dtype)
    mine, out = put(values), empty((90, 150), dtype)
    where: dict[str, Any] = {"address": f"unix:{tmp_path}/p", "token": TOKEN}
    with (
        Publisher(layout, {"w": mine}, **where) as publisher,
        Subscriber(layout, {"w": out}, **where) as subscriber,
    ):
        for version in range(5):
            mine[...] = put(values)
            publisher.publish(version, wait=bool(version % 2))
            background = subscriber.pull(20, wait=False) if version % 2 else None
            assert (subscriber.pull(20) if background is None else background.wait()) == version
            held = subscriber.weights["w"]
            assert type(held) is type(out)
            assert (held is out) == bool(version % 2)
            assert _bits(held) == values.tobytes()
            said = subscriber.report()
            if way == "streams" and version:
                assert said["changed_elems"] == 40
                assert said["received_bytes"] < 40 * 12
            _change(rng, values, 40)


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_versions_come_to_a_gpu_as_mxfp8(
    tmp_path: Path, rng: np.random.Generator, way: str, dtype: str, swizzled: bool
) -> None:
    rows, cols = 130, 192
    values = rng.standard_normal((rows, cols), np.float32).astype(dtypes.get(dtype).numpy)
    codes = empty((rows, cols), "uint8")
    scales = empty((swizzled_bytes(rows, cols // 32),) if swizzled else (rows, cols // 32), "uint8")
    room = (SwizzledMXFP8 if swizzled else MXFP8Tensor)(codes, scales)
    transform = MXFP8ReshardTransform(["w"], {"w": room})
    where: dict[str, Any] = {"address": f"unix:{tmp_path}/p", "token": TOKEN}
    with (
        Publisher(_one((rows, cols), dtype), {"w": values}, **where) as publisher,
        Subscriber(_one((rows, cols), dtype), {}, transform=transform, **where) as subscriber,
    ):
        for version in range(4):
            publisher.publish(version)
            assert subscriber.pull(20) == version
            held = subscriber.weights["w"]
            wanted = quantize_mxfp8(values.astype(dtypes.get("bfloat16").numpy))
            scale = swizzle_scales(wanted.scale) if swizzled else wanted.scale
            assert _bits(held.data) == wanted.data.tobytes()
            assert _bits(held.scale) == scale.tobytes()
            if way == "streams" and version:
                assert subscriber.report()["received_bytes"] < values.nbytes / 4
            at = rng.choice(values.size, 9, replace=False)
            values.reshape(-1)[at] *= -2


def test_what_the_gpu_has_queued_is_waited_for(tmp_path: Path, rng: np.random.Generator, cupy: Any) -> None:
    """Copies come behind what is on the stream that the caller has made current, or names, and delay nothing there."""
    values = _random(rng, (64, 64), "float32")
    layout, mine, out = _one((64, 64), "float32"), put(values * 0), put(values * 0)
    where: dict[str, Any] = {"address": f"unix:{tmp_path}/p", "token": TOKEN}
    cupy.cuda.Device().synchronize()
    with (
        Publisher(layout, {"w": mine}, **where) as publisher,
        Subscriber(layout, {"w": out}, **where) as subscriber,
    ):
        for version, (wait, named) in enumerate(
            (wait, named) for wait in (True, False) for named in (True, False)
        ):
            user = cupy.cuda.Stream(non_blocking=True)
            with user:
                busy(cupy, 0.05)
                mine[...] = put(values + version)
                if not named:
                    done = publisher.publish(version, wait)
            if named:
                done = publisher.publish(version, wait, stream=user)
            assert done is None or done.wait() is None
            assert user.done, "the version is served before it is there"
            user = cupy.cuda.Stream(non_blocking=True)
            if named:
                pulled: Any = subscriber.pull(20, wait=wait, stream=user)
            else:
                with user:
                    pulled = subscriber.pull(20, wait=wait)
            assert (pulled if wait else pulled.wait()) == version
            with user:
                assert _bits(subscriber.weights["w"]) == (values + version).tobytes()
            cupy.cuda.Device().synchronize()


def test_a_gpu_that_fails_leaves_the_version_that_is_served(
    tmp_path: Path, rng: np.random.Generator, answers: Answers, way: str
) -> None:
    values = _random(rng, (64, 64), "uint8")
    layout, mine, out = _one((64, 64), "uint8"), put(values), put(np.zeros_like(values))
    where: dict[str, Any] = {"address": f"unix:{tmp_path}/p", "token": TOKEN}
    with (
        Publisher(layout, {"w": mine}, **where) as publisher,
        Subscriber(layout, {"w": out}, delta="off", **where) as subscriber,
    ):
        publisher.publish(1)
        assert subscriber.pull(20) == 1
        mine[...] = put(values + 1)
        answers.status = Answers.ILLEGAL_ADDRESS
        refused(lambda: publisher.publish(2), CommError, "cudaError")
        assert publisher.version == 1
        answers.status = None
        publisher.publish(3)
        answers.status = Answers.ILLEGAL_ADDRESS
        refused(lambda: subscriber.pull(20), CommError, "cudaError")
        assert subscriber.version == 1
        answers.status = None
        assert _bits(subscriber.weights["w"]) == values.tobytes()
        assert subscriber.pull(20) == 3
        assert _bits(subscriber.weights["w"]) == (values + 1).tobytes()
