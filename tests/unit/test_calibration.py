"""What was measured of a machine: kept, read once, left aside where it is not to be believed, set by hand; and how."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from lowshard import calibration as module
from lowshard.calibration import NEVER, SCHEMA, Calibration, calibration, kept, machine, save, setting_fault
from lowshard.errors import ProfileError
from lowshard.warmup import machine_measure
from lowshard.warmup.machine_measure import STEPS, best_threshold, measure

FOUND = Calibration(stream_from_bytes=1 << 20, pipes_from_bytes=NEVER)


@pytest.fixture(autouse=True)
def cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A cache folder of its own, and nothing read before."""
    monkeypatch.setattr(
        module, "cache_root", lambda: tmp_path / "lowshard"
    )  # compiled code stays where it is
    monkeypatch.delenv("LOWSHARD_CALIBRATION", raising=False)
    calibration.cache_clear()
    yield tmp_path / "lowshard" / "calibration"
    calibration.cache_clear()


def test_without_a_file_the_defaults_hold_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert calibration() == Calibration()
    assert kept() == (None, "")
    assert capsys.readouterr().err == ""


def test_what_is_saved_is_read_once_a_process(cache_folder: Path) -> None:
    path = save(FOUND, "2026-01-02 03:04")
    assert path.parent == cache_folder
    assert path.stat().st_mode & 0o777 == 0o600
    assert cache_folder.stat().st_mode & 0o777 == 0o700
    assert calibration() == FOUND
    save(Calibration(), "later")
    assert calibration() is calibration()
    assert calibration() == FOUND


def test_another_machine_of_the_same_home_has_a_file_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = save(FOUND, "now")
    monkeypatch.setattr(module, "machine", lambda: "another processor")
    assert kept() == (None, "")
    assert save(Calibration(), "now") != mine
    mine.rename(module.folder() / module._file_name())
    record, fault = kept()
    assert record is None
    assert "measured on" in fault


def test_a_machine_is_its_processor_cores_and_caches() -> None:
    assert f"{os.cpu_count()} cores" in machine()
    assert "caches" in machine()


def whole(**changed: object) -> str:
    data = {"schema": SCHEMA, "machine": machine(), "measured_at": "now", "values": asdict(FOUND)}
    return json.dumps(data | changed)


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "\xff{", "{}", whole(schema="another"), whole(machine=5), whole(more=1), whole(values={}) + "}",
        *(whole(values=asdict(FOUND) | {"stream_from_bytes": bad}) for bad in (0, -1, 1.5, "5", None, True, NEVER + 1)),
        whole(values=asdict(FOUND) | {"another": 1 << 20}),
    ],
)  # fmt: skip
def test_a_damaged_file_is_left_aside_said_once_and_replaced_by_the_next(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save(FOUND, "now")
    path.write_bytes(text.encode("latin-1"))
    assert calibration() == calibration() == Calibration()
    said = capsys.readouterr().err
    assert said.count("lowshard:") == 1
    assert str(path) in said
    assert "lowshard warmup" in said
    save(FOUND, "now")
    calibration.cache_clear()
    assert calibration() == FOUND


def test_a_later_rank_says_nothing_of_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(FOUND, "now").write_text("damaged")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    assert calibration() == Calibration()
    assert capsys.readouterr().err == ""


def test_what_others_may_write_to_is_not_believed(cache_folder: Path) -> None:
    path = save(FOUND, "now")
    path.chmod(0o660)
    assert "may be written to by others" in kept()[1]
    path.chmod(0o600)
    cache_folder.chmod(0o777)
    assert "may be written to by others" in kept()[1]
    with pytest.raises(PermissionError):
        save(FOUND, "now")
    cache_folder.chmod(0o700)
    aside = path.rename(path.with_suffix(".aside"))
    path.symlink_to(aside)
    assert kept()[0] is None
    path.unlink()
    os.mkfifo(path)
    assert "not a regular file" in kept()[1]


def test_the_setting_stands_above_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    save(FOUND, "now")
    monkeypatch.setenv("LOWSHARD_CALIBRATION", "stream_from_bytes=8388608, last_cache_bytes=never")
    assert asdict(calibration()) == asdict(FOUND) | {"stream_from_bytes": 8 << 20, "last_cache_bytes": NEVER}
    monkeypatch.setenv("LOWSHARD_CALIBRATION", "off")
    calibration.cache_clear()
    assert calibration() == Calibration()


@pytest.mark.parametrize(
    "text", ["on", "", "stream_from_bytes", "stream_from_bytes=", "stream_from_bytes=4MiB", "size=4096",
             "stream_from_bytes=5", "stream_from_bytes=-4096", "stream_from_bytes=٤٠٩٦٠"],
)  # fmt: skip
def test_a_wrong_setting_is_an_error_that_names_it(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWSHARD_CALIBRATION", text)
    with pytest.raises(ProfileError, match="LOWSHARD_CALIBRATION") as caught:
        calibration()
    assert setting_fault() == str(caught.value)


# ---- how it is found


@pytest.mark.parametrize(
    ("costs", "default", "best"),
    [
        ({1: (1.0, 3.0), 2: (1.0, 2.0), 4: (2.0, 1.0)}, 1, 4),
        ({1: (1.0, 3.0), 2: (1.0, 2.0), 4: (1.0, 2.0)}, 1, NEVER),
        ({1: (3.0, 1.0), 2: (2.0, 1.0), 4: (2.0, 1.0)}, 4, 1),
        # A size that was disturbed: the sizes around it decide.
        ({1: (1.0, 2.0), 2: (2.0, 1.0), 4: (1.0, 1.5), 8: (3.0, 1.0)}, 8, 2),
        # No clear gain: the default stays, between the sizes as well.
        ({1: (1.0, 1.05), 2: (1.05, 1.0), 4: (1.05, 1.0)}, 4, 4),
        ({1: (1.0, 2.0), 4: (2.0, 1.0)}, 3, 3),
        ({}, 7, 7),
    ],
)
def test_a_threshold_is_where_least_is_lost(
    costs: dict[int, tuple[float, float]], default: int, best: int
) -> None:
    assert best_threshold(costs, default) == best


def test_measuring_gives_values_takes_little_and_leaves_threads_where_they_were() -> None:
    may_run_on, steps, begin_s = os.sched_getaffinity(0), [], time.process_time()
    found = measure(lambda: steps.append(1))
    took_s = time.process_time() - begin_s
    assert Calibration(**asdict(found)) == found  # all of them within bounds
    assert len(steps) == STEPS
    assert took_s < 3.0
    assert os.sched_getaffinity(0) == may_run_on


def test_results_are_streamed_no_later_than_by_default_whatever_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a large cache holds what is measured, and not what is packed."""
    monkeypatch.setattr(machine_measure, "best_threshold", lambda costs, default: 4 * default)
    assert measure().stream_from_bytes == Calibration().stream_from_bytes
    monkeypatch.setattr(machine_measure, "best_threshold", lambda costs, default: default // 4)
    assert measure().stream_from_bytes == Calibration().stream_from_bytes // 4


def test_what_cannot_be_measured_has_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})

    def barred(*args: object) -> None:
        raise PermissionError

    monkeypatch.setattr(machine_measure._Ways, "read", barred)
    assert machine_measure._shared(lambda: None) == machine_measure._handed(lambda: None) == {}


def test_memory_that_is_handed_on_or_read_comes_whole() -> None:
    ways = machine_measure._Ways(1 << 20)
    try:
        for way, size in ((ways.read, 70_000), (ways.hand_on, 70_000), (ways.hand_on, 1 << 20)):
            ways._from[...], ways._to[...] = np.arange(1 << 20) % 251, 255
            way(size)
            assert (ways._to[:size] == ways._from[:size]).all()
            assert (ways._to[size:] == 255).all()
    finally:
        ways.close()


def test_kernels_and_copies_go_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowshard.kernels.engine import host_engine
    from lowshard.transfer import spans

    monkeypatch.setenv("LOWSHARD_CALIBRATION", "stream_from_bytes=4096")
    engine = type(host_engine())()
    if engine.name == "numba":
        assert engine.stream_from_bytes == 4096
    span = spans.packed_span(0, (4096,), 1)
    assert spans.BoxCopy([span], [span])._streams
    monkeypatch.setenv("LOWSHARD_CALIBRATION", "stream_from_bytes=never")
    calibration.cache_clear()
    assert not spans.BoxCopy([span], [span])._streams
