"""Publishers and subscribers of arrays on a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gpu import busy

import lowshard as ls
from lowshard import dtypes
from lowshard.foreign_array import host_of
from lowshard.kernels import MXFP8Tensor, SwizzledMXFP8, quantize_mxfp8
from lowshard.reshard import MXFP8ReshardTransform, Publisher, Subscriber
from lowshard.transfer import device_copies


@pytest.fixture(params=["mapped", "streams"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(device_copies, "SLOT_BYTES", 8192)  # several rounds for a few rows
    monkeypatch.setenv("LOWSHARD_CROSS_MEMORY", "off" if request.param == "streams" else "auto")
    return str(request.param)


def put(values: np.ndarray) -> Any:
    """Return a copy on the GPU; of fp8, as integers."""
    import cupy

    fits = values.view(np.uint8) if dtypes.get(values.dtype).bits == 8 else values
    return cupy.asarray(np.array(fits, order="C"))


def both_sides(folder: Path, values: Any, mine: Any, out: Any, **how: Any) -> tuple[Publisher, Subscriber]:
    """Return a publisher of one array and a subscriber; `how` are options of the latter."""
    layout = ls.Layout(ls.DeviceMesh((1,), ("x",)), values.shape, values.dtype.name, (ls.Replicated(),))
    where: dict[str, Any] = {"address": f"unix:{folder}/p", "token": bytes(32)}
    publisher = Publisher({"w": layout}, {"w": mine}, **where)
    return publisher, Subscriber({"w": layout}, {"w": out} if out is not None else {}, **where, **how)


def bits_of(values: Any) -> bytes:
    if isinstance(values, (MXFP8Tensor, SwizzledMXFP8)):
        return bits_of(values.data) + bits_of(values.scale)
    return bytes(host_of(values).tobytes())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "uint8", "float8_e4m3fn"])
def test_versions_go_from_a_gpu_to_a_gpu(tmp_path: Path, rng: Any, way: str, dtype: str) -> None:
    """Whole, and what changed: bits of any kind, through slots that are smaller than the array."""
    raw = np.frombuffer(rng.bytes(90 * 150 * 4), dtypes.get(dtype).numpy)
    values = raw[: 90 * 150].reshape(90, 150).copy()
    mine, out = put(values), put(np.zeros_like(values))
    publisher, subscriber = both_sides(tmp_path, values, mine, out)
    with publisher, subscriber:
        for version in range(5):
            mine[...] = put(values)
            publisher.publish(version, wait=bool(version % 2))
            pulled: Any = subscriber.pull(20, wait=version % 2 == 0)
            assert (pulled.wait() if version % 2 else pulled) == version
            held = subscriber.weights["w"]
            assert (type(held), held is out) == (type(out), bool(version % 2))
            assert bits_of(held) == values.tobytes()
            if way == "streams" and version:
                said = subscriber.report()
                assert (said["changed_elems"], said["received_bytes"] < 40 * 12) == (40, True)
            at = rng.choice(values.size, 40, replace=False)
            values.view(f"u{values.itemsize}").reshape(-1)[at] ^= 1


@pytest.mark.parametrize("layout", ["rows", "128x4"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_versions_come_to_a_gpu_as_mxfp8(tmp_path: Path, rng: Any, way: str, dtype: str, layout: Any) -> None:
    values = rng.standard_normal((130, 192), np.float32).astype(dtypes.get(dtype).numpy)
    bf16 = dtypes.get("bfloat16").numpy
    wanted: Any = lambda: quantize_mxfp8(values.astype(bf16), scale_layout=layout)  # noqa: E731
    room = type(wanted())(*(put(np.zeros_like(part)) for part in (wanted().data, wanted().scale)))
    transform = MXFP8ReshardTransform(["w"], {"w": room})
    publisher, subscriber = both_sides(tmp_path, values, values, None, transform=transform)
    with publisher, subscriber:
        for version in range(4):
            publisher.publish(version)
            assert subscriber.pull(20) == version
            assert bits_of(subscriber.weights["w"]) == bits_of(wanted())
            if way == "streams" and version:
                assert subscriber.report()["received_bytes"] < values.nbytes / 4
            values.reshape(-1)[rng.choice(values.size, 9, replace=False)] *= -2


def test_what_the_gpu_has_queued_is_waited_for(tmp_path: Path, rng: np.random.Generator, cupy: Any) -> None:
    """Copies come behind what is on the stream that is current, or named, and delay nothing there."""
    values = rng.standard_normal((64, 64), np.float32)
    mine, out = put(values * 0), put(values * 0)
    cupy.cuda.Device().synchronize()
    publisher, subscriber = both_sides(tmp_path, values, mine, out)
    with publisher, subscriber:
        for version, (wait, named) in enumerate(product((True, False), (True, False))):
            user = cupy.cuda.Stream(non_blocking=True)
            given = {"stream": user} if named else {}
            with user:
                busy(cupy, 0.05)
                mine[...] = put(values + version)
            with nullcontext() if named else user:
                done = publisher.publish(version, wait, **given)
            assert done is None or done.wait() is None
            assert user.done, "the version is served before it is there"
            with nullcontext() if named else user:
                pulled: Any = subscriber.pull(20, wait=wait, **given)
            assert (pulled if wait else pulled.wait()) == version
            with user:
                assert bits_of(subscriber.weights["w"]) == (values + version).tobytes()
            cupy.cuda.Device().synchronize()
