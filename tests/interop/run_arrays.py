"""Arrays of torch and JAX in every kind of call that takes arrays: started by test_arrays_of_libraries.py.

Prints a JSON object: for each function and library nothing, or what went wrong.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.libraries import (
    DTYPES,
    Array,
    address,
    bits,
    dtype_of,
    given,
    library_of,
    numpy_dtype,
    random_values,
)

from lowshard import (
    DeviceMesh,
    Layout,
    LowshardError,
    Partial,
    Replicated,
    Sharded,
    execute,
    plan_redistribute,
    redistribute,
)
from lowshard import kernels as lk
from lowshard.checkpoint import CheckpointReader
from lowshard.comm import Communicator, loopback, run_loopback
from lowshard.foreign_array import READ_ONLY, view_in_call, view_of
from lowshard.fsdp import FSDP, Param
from lowshard.reshard import (
    MXFP8ReshardTransform,
    Publisher,
    Refit,
    Subscriber,
    TensorLayout,
    build_reshard_plan,
    digest,
)
from lowshard.weights import ShardingStrategy, load, plan_load, save

warnings.simplefilter("error")
jax.config.update("jax_enable_x64", True)

WRITEABLE = ("numpy", "torch")
CASES: list[Callable[[str, int, int], None]] = []
LIMIT_S = 60
FULL = 200
"""Layouts of a full run."""
RANKS = 3
TP = DeviceMesh((2,), ("tp",))
ROWS, WHOLE = (Sharded(0),), (Replicated(),)


def some_of(names: tuple[str, ...], count: int, seed: int) -> list[str]:
    """Return the dtypes to go through: all in a full run, else those unlike the others, and one of the rest."""
    if count >= FULL:
        return list(names)
    chosen = ("float32", "bfloat16", "float8_e4m3fn")
    return [*chosen, sorted(set(names) - {*chosen})[seed % (len(names) - len(chosen))]]


def same(found: Array, wanted: Array, library: str) -> None:
    """Demand a library's array of the bits of another."""
    assert library_of(found) == library, type(found)
    assert bits(found) == bits(wanted)


def told(call: Callable[[], object]) -> str:
    try:
        call()
    except LowshardError as error:
        return str(error)
    return "nothing was raised"


def calls(comm: Communicator, make: Callable[[tuple[int, ...]], Array], room: Callable[[int], Array], folds: bool
          ) -> Iterator[tuple[str, list[Any], list[Array]]]:  # fmt: skip
    """Yield each collective: its name, its arguments, and the buffers that it writes."""
    n, r = comm.size, comm.rank
    counts, starts = [1, 0, 2][:n], [0, 0, 1][:n]  # on two ranks one gives nothing
    whole = room(2 * n)
    yield "all_gather", [make((2,)), whole], [whole]
    yield "all_gather_v", [make((counts[r],)), v := room(sum(counts)), counts, starts], [v]
    yield "all_to_all", [make((2 * n,)), whole := room(2 * n)], [whole]
    every = [2] * n, [2 * i for i in range(n)]
    yield "all_to_all_v", [make((2 * n,)), *every, whole := room(2 * n), *every], [whole]
    buf = make((4,)) if r == 1 else room(4)
    yield "broadcast", [buf, 1], [] if r == 1 else [buf]
    yield "gather", [make((2,)), g := room(2 * n) if r == n - 1 else None, n - 1], [g] if r == n - 1 else []
    yield "scatter", [make((2 * n,)) if r == 0 else None, s := room(2), 0], [s]
    yield "send_recv", [make((2, 3)), (r + 1) % n, s := room(6), (r - 1) % n], [s]
    if not folds:
        return
    for op, order in product(("sum", "max"), ("fast", "tree")):
        yield "all_reduce", [make((7,)), s := room(7), op, order], [s]
        yield "reduce_scatter", [make((2 * n,)), s := room(2), op, order], [s]
        yield "reduce", [make((3,)), s := room(3) if r == 1 else None, op, 1, order], [s] if r == 1 else []


def collectives(
    comm: Communicator, sender: str, receiver: str, dtype: str, start: bool, seed: int
) -> list[Any]:
    rng = np.random.default_rng([seed, comm.rank, DTYPES.index(dtype)])

    def make(shape: tuple[int, ...]) -> Array:
        return given(sender, random_values(rng, shape, dtype))

    def room(elems: int) -> Array:
        return given(receiver, np.zeros(elems, numpy_dtype(dtype)))

    found = []
    for name, args, written in calls(comm, make, room, not dtype.endswith("fnu")):
        before = [address(w) for w in written]
        if start:
            getattr(comm.start, name)(*args).wait() if name != "send_recv" else comm.send_recv(*args)
        else:
            getattr(comm, name)(*args)
        assert [address(w) for w in written] == before, name
        found += [(name, *bits(w)) for w in written]
    return found


@CASES.append
def in_collectives(library: str, count: int, seed: int) -> None:
    for dtype in some_of(DTYPES, count, seed):
        wanted = run_loopback(RANKS, lambda c: collectives(c, "numpy", "numpy", dtype, False, seed), LIMIT_S)  # noqa: B023
        assert sum(map(len, wanted)) > 18
        for sender, receiver in {(library, "numpy"), (library, "torch"), ("numpy", "torch")}:
            start = receiver == "torch"
            got = run_loopback(RANKS, lambda c: collectives(c, sender, receiver, dtype, start, seed), LIMIT_S)  # noqa: B023
            assert got == wanted, (dtype, sender, receiver)

    def job(comm: Communicator) -> None:
        out, other = torch.zeros(2, 3, dtype=torch.bfloat16), 1 - comm.rank
        sent = given(library, np.full((2, 3), 1 + comm.rank, numpy_dtype("bfloat16")))
        with comm.grouped():
            comm.send(sent, other)
            comm.recv(out, other)
        assert (out == 1 + other).all()
        out.zero_()
        for work in [comm.start.send(sent, other), comm.start.recv(out, other)]:
            work.wait()
        assert (out == 1 + other).all()

    run_loopback(2, job, LIMIT_S)


@CASES.append
def seen_where_they_lie(library: str, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for dtype, shape, view in product(DTYPES, ((), (5,), (3, 4), (0, 2)), (view_in_call, view_of)):
        mine = given(library, random_values(rng, shape, dtype))
        seen = view(mine, "x")
        assert isinstance(seen, np.ndarray)
        assert bits(seen) == bits(mine), dtype
        assert not seen.size or seen.ctypes.data == address(mine)
        assert seen.flags.writeable == (library == "torch")
    if library == "jax":
        devices = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
        spec = jax.sharding.NamedSharding(devices, jax.sharding.PartitionSpec("x"))
        over = jax.device_put(jnp.zeros(4), spec)
        assert "addressable_shards" in told(lambda: view_of(over, "x"))
        part = over.addressable_shards[1].data
        assert view_of(part, "x").ctypes.data == part.unsafe_buffer_pointer()
        said = []
        jax.jit(lambda x: said.append(told(lambda: view_of(x, "x"))) or x)(jnp.zeros(2))  # type: ignore[func-returns-value]
        assert "within jit" in said[0]
        return
    t = torch.arange(12.0).reshape(3, 4)
    for view in (view_in_call, view_of):
        assert view(t.T, "x").strides == (4, 16)
        assert bits(view(t.T[1:, ::2], "x")) == bits(t.T[1:, ::2])
        assert view(t[:1].expand(3, 4), "x").strides == (0, 4)
    seen = view_in_call(torch.arange(3.0), "x")  # which keeps the tensor
    gc.collect()
    assert list(seen) == [0, 1, 2]
    # As FSDP does: what a call has taken can be resized, and what has no memory is refused.
    part, whole = torch.ones(40), torch.zeros(40)
    (comm,) = loopback(1)
    comm.all_gather(part, whole)
    for tensor in (part, whole):
        size_bytes = tensor.untyped_storage().nbytes()
        for left_bytes in (0, size_bytes - 8):
            tensor.untyped_storage().resize_(left_bytes)
            assert "storage" in told(lambda: comm.all_gather(part, whole))
        tensor.untyped_storage().resize_(size_bytes)


def random_layout(
    rng: np.random.Generator, mesh: DeviceMesh, shape: tuple[int, ...], dtype: Any, kinds: int
) -> Layout:
    """Return a layout with any of the first kinds of placement on each axis."""
    sharded = Sharded(int(rng.integers(len(shape))), ("balanced", "ceil")[rng.integers(2)])
    places = [Replicated(), sharded, Partial("sum")]
    return Layout(mesh, shape, dtype, [places[rng.integers(kinds)] for _ in mesh.axis_names])


@CASES.append
def redistributed(library: str, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    meshes = [DeviceMesh((4,), ("tp",)), DeviceMesh((2, 2), ("dp", "tp")), DeviceMesh((3,), ("tp",))]
    done = 0
    while done < count:
        mesh = meshes[rng.integers(len(meshes))]
        shape = tuple(int(n) for n in rng.integers(1, 9, rng.integers(1, 4)))
        dtype = DTYPES[rng.integers(len(DTYPES))]
        try:
            src = random_layout(rng, mesh, shape, dtype, 2 if dtype in ("bool", "float8_e8m0fnu") else 3)
            dst = random_layout(rng, mesh, shape, dtype, 2)
            plan = plan_redistribute(src, dst)
        except LowshardError:  # one dim cut by two rules
            continue
        assert Layout(mesh, shape, dtype_of(library, dtype), src.placements) == src
        done += 1
        parts = [random_values(rng, src.local_shape(rank), dtype) for rank in range(mesh.size)]

        def job(comm: Communicator, plan=plan, parts=parts, src=src, dst=dst, dtype=dtype) -> None:
            wanted = execute(plan, parts[comm.rank], comm)
            local = given(library, parts[comm.rank])
            result = execute(plan, local, comm)
            same(result, wanted, library)
            if library == "torch" and result.numel():  # torch has no read-only tensors: it must be apart
                assert result.data_ptr() != local.data_ptr()
            same(redistribute(local, src, dst, comm), wanted, library)
            out = given("torch", np.zeros(dst.local_shape(comm.rank), numpy_dtype(dtype)))
            at = out.data_ptr()
            assert execute(plan, local, comm, out) is out
            same(out, wanted, "torch")
            assert out.data_ptr() == at

        run_loopback(mesh.size, job, LIMIT_S)


@CASES.append
def computed_with(library: str, count: int, seed: int) -> None:
    rng, boxes = np.random.default_rng(seed), [((0, 2), (0, 64)), ((5, 8), (32, 64))]
    for dtype in ("float32", "float16", "bfloat16"):
        x = rng.standard_normal((8, 64)).astype(numpy_dtype(dtype))
        y, q = given(library, x), lk.quantize_mxfp8(x)
        p = lk.quantize_mxfp8(y)
        for made, wanted in (
            (p.data, q.data), (p.scale, q.scale), (lk.dequantize_mxfp8(p), lk.dequantize_mxfp8(q)),
            (lk.quantize_mxfp8(y, scale_layout="128x4").scale, lk.swizzle_scales(q.scale)),
            (lk.swizzle_scales(p.scale), lk.swizzle_scales(q.scale)), (lk.pack(y, boxes), lk.pack(x, boxes)),
            (lk.cast(y, dtype_of(library, "float32")), lk.cast(x, "float32")),
            (lk.pack_quantize(y, boxes).data, lk.pack_quantize(x, boxes).data),
        ):  # fmt: skip
            same(made, wanted, library)
        over = lk.MXFP8Tensor.over(
            torch.zeros(lk.MXFP8Tensor.buffer_bytes((8, 64)), dtype=torch.uint8), (8, 64)
        )
        assert lk.quantize_mxfp8(y, out=over) is over
        same(over.data, q.data, "torch")
        out, mine = torch.zeros(8, 64, dtype=getattr(torch, dtype)), np.zeros_like(x)
        for write in (
            lambda a, to: lk.unpack(lk.pack(a, boxes), boxes, to),
            lambda a, to: lk.unpack_dequantize(lk.pack_quantize(a, boxes), boxes, to),
            lambda a, to: lk.sum_into(to, [a, x]),  # noqa: B023
        ):
            assert write(y, out) is out
            write(x, mine)
            same(out, mine, "torch")
        turned = torch.zeros(64, 8, dtype=getattr(torch, dtype)).T  # strides are taken where NumPy's are
        same(lk.cast(y, dtype_of(library, dtype), turned), x, "torch")
    state = [rng.random(100, np.float32) for _ in range(4)]
    theirs = [given(library if i == 1 else "torch", a) for i, a in enumerate(state)]  # gradients are read
    adam = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "step": 3}
    lk.adamw_step(*state, **adam)
    lk.adamw_step(*theirs, **adam)
    assert [bits(a) for a in theirs] == [bits(a) for a in state]
    weight, rows = np.arange(48.0, dtype=np.float32).reshape(12, 4), ShardingStrategy.rowwise(2)
    same(rows(given(library, weight), 1), rows(weight, 1), library)


def refit_layouts(dtype: str) -> tuple[dict[str, TensorLayout], dict[str, TensorLayout]]:
    rows, cols = (DeviceMesh((2,), ("tp",), ranks=(0, 1)), DeviceMesh((2,), ("tp",), ranks=(2, 3)))
    return (
        {"w": TensorLayout.from_layout(Layout(rows, (8, 64), dtype, (Sharded(0),)))},
        {"w": TensorLayout.from_layout(Layout(cols, (8, 64), dtype, (Sharded(1),)))},
    )


@CASES.append
def refitted_and_published(library: str, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for dtype in some_of(DTYPES, count, seed):
        whole = random_values(rng, (8, 64), dtype)
        plan = build_reshard_plan(*refit_layouts(dtype))

        def job(comm: Communicator, plan=plan, whole=whole, dtype=dtype) -> None:
            r = comm.rank
            src = {"w": given(library, whole[4 * r : 4 * r + 4])} if r < 2 else {}
            dst = {"w": given("torch", np.zeros((8, 32), numpy_dtype(dtype)))} if r >= 2 else {}
            mine = np.ascontiguousarray(whole[:, 32 * r - 64 : 32 * r - 32])
            versions = (1, 2) if library == "torch" else (1, 1)  # again, as where a server has failed
            with Refit(plan, comm, src, dst) as refit:
                for version in versions:
                    refit.push(version) if r < 2 else refit.pull()
                    if r >= 2:
                        same(refit.weights["w"], mine, "torch")
                if r >= 2:
                    assert refit.weights["w"] is dst["w"]
                if library == "jax":
                    assert "never change" in told(lambda: refit.push(2) if r < 2 else refit.pull())
                    assert refit.version == 1
            if dtype != "bfloat16":
                return
            codes, scales = (torch.zeros(shape, dtype=torch.uint8) for shape in ((8, 32), (8, 1)))
            held = {"w": lk.MXFP8Tensor(codes, scales)}
            how = MXFP8ReshardTransform(["w"], held if r >= 2 else {})
            with Refit(plan, comm, src, {}, how) as refit:
                refit.push(1) if r < 2 else refit.pull()
                if r >= 2:
                    same(refit.weights["w"].data, lk.quantize_mxfp8(mine).data, "torch")

        run_loopback(4, job, LIMIT_S)
    layout = Layout(DeviceMesh((1,), ("one",)), (8, 4), torch.bfloat16, WHOLE)
    source = given(library, np.ones((8, 4), numpy_dtype("bfloat16")))
    out = torch.zeros(8, 4, dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        where: dict[str, Any] = {"address": f"unix:{folder}/door", "token": b"0123456789abcdef" * 2}
        with (
            Publisher({"w": layout}, {"w": source}, **where) as publisher,
            Subscriber({"w": layout}, {"w": out}, **where) as subscriber,
        ):
            for version in (1, 2) if library == "torch" else (1,):
                publisher.publish(version, wait=False)
                assert subscriber.pull(30) == version
                same(subscriber.weights["w"], source, "torch")
                assert (subscriber.weights["w"] is out) == (version == 2)
            if library == "jax":
                assert "numpy.copyto" in told(lambda: publisher.publish(2))


@CASES.append
def saved_loaded_and_filled(library: str, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        for dtype in some_of(DTYPES, count, seed):
            layout = Layout(TP, (5, 4), dtype_of(library, dtype), ROWS)
            whole = random_values(rng, (5, 4), dtype)
            at = Path(folder, dtype)

            def job(comm: Communicator, layout=layout, whole=whole, at=at) -> None:
                (a, b), _ = layout.box(comm.rank)
                local = given(library, whole[a:b])
                if library == "torch":
                    local = given(library, np.ascontiguousarray(whole[a:b].T)).T  # of other strides
                save(at, {"w": (layout, local)}, comm)
                save(at.with_suffix(".safetensors"), {"w": (layout, local)}, comm, merged=True)
                assert digest({"w": (layout, local)}, comm) == digest({"w": (layout, whole[a:b])}, comm)

            run_loopback(2, job, LIMIT_S)
            wanted = Layout(DeviceMesh((1,), ("one",)), (5, 4), dtype_of(library, dtype), WHOLE)
            assert bits(load(at, plan_load(at, {"w": wanted}))["w"]) == bits(whole)
            with CheckpointReader(at.with_suffix(".safetensors")) as reader:
                out = given("torch", np.zeros((5, 4), numpy_dtype(dtype)))
                assert reader.read_box("w", out=out) is out
                same(out, whole, "torch")
    full = rng.random((7, 5)).astype(np.float32)

    def filled(comm: Communicator) -> None:
        for dtype in ("float32", "bfloat16"):
            assert Param("w", (2,), dtype=dtype_of(library, dtype)) == Param("w", (2,), dtype=dtype)
            with FSDP({"l0": [Param("w", (7, 5))]}, comm) as engine:
                engine.fill(lambda _, box: given(library, full[tuple(slice(*i) for i in box)].astype(dtype)))  # noqa: B023
                assert bits(engine.full("l0.w")) == bits(full.astype(dtype).astype(np.float32))

    run_loopback(2, filled, LIMIT_S)


class Elsewhere:
    """Says that it has DLPack, on a device that is not here."""

    def __init__(self, *place: int) -> None:
        self.place = place

    def __dlpack_device__(self) -> Any:
        return self.place

    def __dlpack__(self, **options: Any) -> Any:
        raise OSError("gone")


def wrong_arrays(library: str) -> dict[str, Any]:
    """Return arrays that no call takes, by the word that helps."""
    if library == "jax":
        deleted = jnp.zeros(4)
        deleted.delete()
        return {
            "got list": [0.0] * 4, "deleted": deleted, "PRNGKeyArray": jax.random.key(0), "type 8": Elsewhere(8, 0),
            "gone": Elsewhere(1, 0), "CuPy": Elsewhere(2, 0),
        }  # fmt: skip
    return {
        ".detach()": torch.nn.Parameter(torch.zeros(4)), "'meta'": torch.zeros(4, device="meta"),
        ".to_dense()": torch.zeros(4).to_sparse(), ".contiguous()": torch.zeros(8)[::2],
        "complex64": torch.zeros(4, dtype=torch.complex64),
        "float8_e4m3fnuz": torch.zeros(4).to(torch.float8_e4m3fnuz),
    }  # fmt: skip


@CASES.append
def refused(library: str, count: int, seed: int) -> None:
    layout = Layout(TP, (8,), "float32", ROWS)
    plan = plan_redistribute(layout, Layout(TP, (8,), "float32", WHOLE))
    wrongs = wrong_arrays(library)
    frozen = np.zeros(8, np.float32)
    frozen.flags.writeable = False

    def job(comm: Communicator) -> None:
        good, room = np.zeros(4, np.float32), np.zeros(4, np.float32)
        for word, wrong in wrongs.items():
            for call in (lambda: comm.all_reduce(wrong, room), lambda: comm.all_reduce(good, wrong)):  # noqa: B023
                assert word in told(call), (word, told(call))
            if word != ".contiguous()":  # where any strides are taken
                one = wrong if comm.rank == 1 else good  # plans agree before bytes move: all are told
                assert word in told(lambda: execute(plan, one, comm)), word  # noqa: B023
                assert "nothing" not in told(lambda: save(Path("/nowhere"), {"w": (layout, one)}, comm))  # noqa: B023
        for wrong in (jnp.zeros(8, "float32"), frozen):
            x = np.zeros(8, np.float32)
            for write in (
                lambda: comm.all_reduce(x, wrong),  # noqa: B023
                lambda: execute(plan, x[:4], comm, wrong),  # noqa: B023
                lambda: lk.cast(x, "float32", wrong),  # noqa: B023
                lambda: lk.sum_into(wrong, [x]),  # noqa: B023
            ):
                assert READ_ONLY in told(write)

    run_loopback(2, job, LIMIT_S)


def main() -> None:
    count, seed = map(int, sys.argv[1:3])
    found = {}
    for function, library in product(CASES, ("torch", "jax")):
        try:
            function(library, count, seed)
            found[f"{function.__name__} {library}"] = ""
        except Exception:
            found[f"{function.__name__} {library}"] = traceback.format_exc()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
