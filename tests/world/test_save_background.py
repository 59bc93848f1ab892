"""Saves in the background, over threads: what may change meanwhile, one at a time, and who hears of a failure."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import attention_and_more, state_of, values_of

from lowshard.checkpoint import Catalog, CheckpointReader
from lowshard.comm import run_loopback
from lowshard.errors import CheckpointError
from lowshard.fsdp import FSDP, AdamW, Param
from lowshard.tiling import Tiling
from lowshard.weights import load, plan_load, save

RANKS, LIMIT_S = 4, 30.0
TILINGS = attention_and_more(RANKS)


def holds(path: Path, version: int) -> bool:
    catalog = Catalog.open(path)
    whole = {n: Tiling.whole(t.shape, t.dtype) for n, t in catalog.tensors.items()}
    found, right = load(catalog, plan_load(catalog, whole)), values_of(TILINGS, version)
    return {n: a.tobytes() for n, a in found.items()} == {n: right[n].tobytes() for n in found}


def states(version: int, rank: int) -> Any:
    return {
        name: (tiling, None if array is None else array.copy())
        for name, (tiling, array) in state_of(values_of(TILINGS, version), TILINGS, rank).items()
    }


def spoil(state: Any) -> None:
    for _, array in state.values():
        if array is not None:
            array.reshape(-1).view(np.uint8)[...] = 0x5A


@pytest.mark.parametrize("merged", [False, True])
def test_arrays_may_change_and_the_communicator_is_free_as_soon_as_it_returns(
    tmp_path: Path, merged: bool
) -> None:
    def work(comm: Any) -> None:
        for version in range(1, 6):
            state = states(version, comm.rank)
            path = tmp_path / (f"m{version}.safetensors" if merged else "c")
            begun = save(path, state, comm, merged=merged, wait=False)
            spoil(state)
            total = np.ones(8, np.float32)
            comm.all_reduce(total, total)
            assert (total == RANKS).all()
            if version == 3:
                begun.wait(LIMIT_S)
                assert holds(path, version)
                comm.barrier()
        last = save(path, states(6, comm.rank), comm, merged=merged)  # waits for the one before
        assert last is None
        assert begun.done()
        assert holds(path, 6)

    run_loopback(RANKS, work, LIMIT_S)


def test_the_end_of_the_communicator_waits_for_a_save_and_raises_what_nobody_heard(tmp_path: Path) -> None:
    place = tmp_path / "gone"
    place.mkdir()

    def work(comm: Any) -> None:
        with comm:
            begun = save(tmp_path / "c", states(1, comm.rank), comm, wait=False)
        assert begun.done()
        assert holds(tmp_path / "c", 1)

    def failing(comm: Any) -> None:
        begun = save(place / "m.safetensors", states(1, comm.rank), comm, merged=True, wait=False)
        if comm.rank == 1:
            with pytest.raises(CheckpointError):
                begun.wait(LIMIT_S)
            comm.close()
        else:
            with pytest.raises(CheckpointError, match=r"m\.safetensors"):
                comm.close()

    run_loopback(RANKS, work, LIMIT_S)
    with no_more(place):
        run_loopback(RANKS, failing, LIMIT_S)


class no_more:
    """Let every new file of a folder fail in a block."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._open = str(folder), os.open

    def __enter__(self) -> None:
        def refuse(path: Any, flags: int, *args: Any, **options: Any) -> int:
            if str(path).startswith(self._folder) and flags & os.O_CREAT:
                raise OSError(28, "No space left on device")
            return self._open(path, flags, *args, **options)

        os.open = refuse

    def __exit__(self, *exc: object) -> None:
        os.open = self._open


def test_a_failure_is_raised_by_wait_and_by_the_next_save_on_every_rank_unless_all_have_heard(
    tmp_path: Path,
) -> None:
    place = tmp_path / "c"
    place.mkdir()

    def work(comm: Any) -> None:
        save(place, states(1, comm.rank), comm)
        comm.barrier()
        for heard in (set(range(RANKS)), {0, 2}, set[int]()):
            if comm.rank == 0:
                refused.__enter__()
            comm.barrier()
            begun = save(place, states(2, comm.rank), comm, wait=False)
            if comm.rank in heard:
                with pytest.raises(CheckpointError, match="No space left"):
                    begun.wait(LIMIT_S)
            while not begun.done():
                time.sleep(0.001)
            comm.barrier()
            if comm.rank == 0:
                refused.__exit__()
            comm.barrier()
            if len(heard) < RANKS:
                wait = heard == {0, 2}
                with pytest.raises(CheckpointError, match=r"^save: rank 0: (?!.*save: ).*No space"):
                    save(place, states(3, comm.rank), comm, wait=wait)  # type: ignore[call-overload]
                assert holds(place, 1)
            comm.barrier()
        save(place, states(4, comm.rank), comm, wait=False).wait(LIMIT_S)
        assert holds(place, 4)

    refused = no_more(place)
    run_loopback(RANKS, work, LIMIT_S)
    assert not [p for p in place.iterdir() if p.name.endswith(".tmp")]


def test_one_process_without_a_communicator(tmp_path: Path) -> None:
    array = np.arange(1000, dtype=np.float32)
    state = {"w": (Tiling.whole((1000,), "float32"), array)}
    for merged, path in ((False, tmp_path / "c"), (True, tmp_path / "m.safetensors")):
        begun = save(path, state, merged=merged, wait=False)
        array[...] = 7
        begun.wait(LIMIT_S)
        array[...] = np.arange(1000)
        catalog = Catalog.open(path)
        assert np.array_equal(load(catalog, plan_load(catalog, {"w": state["w"][0]}))["w"], array)
    (tmp_path / "full").mkdir()
    with no_more(tmp_path / "full"):
        begun = save(tmp_path / "full", state, wait=False)
        while not begun.done():
            time.sleep(0.001)
    with pytest.raises(CheckpointError, match="No space left"):
        save(tmp_path / "c", state)
    save(tmp_path / "c", state)


@pytest.mark.parametrize("merged", [False, True])
def test_the_place_is_that_of_the_call_wherever_the_program_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, merged: bool
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    has_gone, system_open = threading.Event(), os.open

    def later(*args: Any, **options: Any) -> int:
        if threading.current_thread() is not threading.main_thread():
            assert has_gone.wait(LIMIT_S)
        return system_open(*args, **options)

    monkeypatch.setattr(os, "open", later)
    state = {"w": (Tiling.whole((8,), "float32"), np.ones(8, np.float32))}
    begun = save("c", state, merged=merged, wait=False)
    os.chdir(tmp_path / "there")
    has_gone.set()
    begun.wait(LIMIT_S)
    assert list(Catalog.open(tmp_path / "here" / "c").tensors) == ["w"]
    assert not list((tmp_path / "there").iterdir())


def test_no_call_waits_for_a_thread_that_could_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": (Tiling.whole((8,), "float32"), np.ones(8, np.float32))}

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            save(tmp_path / "c", state, wait=False)
    save(tmp_path / "c", state)


@pytest.mark.time_limit(180)
def test_training_goes_on_while_its_state_is_saved(tmp_path: Path) -> None:
    units = {"l0": [Param("w", (37, 3)), Param("b", (5,))], "l1": [Param("w", (2, 9))]}

    def step(engine: FSDP, number: int) -> None:
        with engine.step():
            for unit in reversed(units):
                engine.open(unit, "backward")
                for name in engine.grads(unit):
                    engine.grads(unit)[name][...] = number
                engine.reduce(unit)
                engine.close(unit)
        engine.join()
        engine.update(AdamW(lr=0.1))

    def work(comm: Any) -> None:
        engine = FSDP(units, comm)
        engine.fill(lambda name, box: np.full([b - a for a, b in box], len(name), np.float32))
        for number in range(1, 4):
            step(engine, number)
            engine.save(tmp_path / f"sync{number}")
            begun = engine.save(tmp_path / f"beside{number}", wait=False)
            if number == 2:
                begun.wait(LIMIT_S)
        step(engine, 4)
        begun.wait(LIMIT_S)

    run_loopback(RANKS, work, 150.0)  # the first run compiles the optimizer
    for number in range(1, 4):
        assert (tmp_path / f"beside{number}").read_bytes() == (tmp_path / f"sync{number}").read_bytes()
    with CheckpointReader(tmp_path / "sync3") as reader:
        assert "l0.w" in reader.header.tensors
