"""`lowshard bench publish`: it runs, says which goals are missed, and leaves nothing of its hosts behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from support.launching import wait_until

from lowshard.bench import bench_publish, raw_stream
from lowshard.bench.bench_publish import LEAST_OF_RAW, MOST_OF_WHOLE, Row, misses, page_of
from lowshard.cli import main
from lowshard.launch.fake_hosts import why_not

REASON = why_not()
on_fake_hosts = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def _rows(of_raw: float, of_whole: float) -> list[Row]:
    return [
        Row("whole version", 1000, (1.0, 1.0, 9.0), (of_raw, of_raw, 9.0)),
        Row("1 % changed", 30, (1.0, 1.0, 1.0), (0.1, 0.1, 0.1), of_whole),
        Row("one small buffer, as iperf", 1000, (1.0, 1.0, 1.0)),
    ]


def test_goals_are_checked_by_the_median_of_ratios() -> None:
    assert list(misses(_rows(LEAST_OF_RAW, MOST_OF_WHOLE))) == []
    (slow,) = misses(_rows(LEAST_OF_RAW - 0.05, MOST_OF_WHOLE))
    assert slow == "a whole version comes at 0.85 of the rate of bare sockets, the goal is 0.9"
    (long,) = misses(_rows(LEAST_OF_RAW, MOST_OF_WHOLE + 0.1))
    assert long == "what has changed takes 0.60 of the time of a whole version, the goal is 0.5"


def test_the_page_shows_what_is_over_its_limit() -> None:
    assert page_of(_rows(1.0, 0.2), 4).is_good
    assert not page_of(_rows(0.5, 0.2), 4).is_good


@pytest.mark.parametrize("hot", [False, True])
@pytest.mark.parametrize("size_bytes", [1, 3, raw_stream.HOT_BYTES * 3 + 1])
def test_bare_sockets_move_all_bytes(size_bytes: int, hot: bool) -> None:

    listens, port = raw_stream.listening("127.0.0.1")
    with listens:
        takes = raw_stream.connected("127.0.0.1", port, 3)
        gives = raw_stream.accepted(listens, 3)
    source = np.arange(size_bytes, dtype=np.uint8)
    target = np.zeros(size_bytes, np.uint8)
    sender = threading.Thread(target=raw_stream.send, args=(gives, source, hot))
    sender.start()
    assert raw_stream.receive(takes, target, hot) > 0
    sender.join(10)
    assert not sender.is_alive()
    if not hot:
        assert (source == target).all()
    for one in (*takes, *gives):
        one.close()


@on_fake_hosts
@pytest.mark.mpi
@pytest.mark.time_limit(60)
def test_it_measures_between_two_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "publish", "--size", "20M", "--rounds", "2"]
    assert main([*argv, "--json", str(tmp_path / "found.json"), "--report", str(tmp_path / "page")]) == 0
    shown = capsys.readouterr().out
    assert "whole version" in shown
    assert (tmp_path / "page" / "index.html").exists()
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["streams"] == 1
    whole, changed, hot = found["rows"]
    assert whole["bytes"] == hot["bytes"] == found["bytes"] == 20 << 20
    assert 0.01 * found["bytes"] < changed["bytes"] < 0.03 * found["bytes"]
    assert all(len(row["seconds"]) == 2 and min(row["seconds"]) > 0 for row in found["rows"])
    assert whole["of_raw"] > 0
    assert changed["of_whole"] > 0


@on_fake_hosts
@pytest.mark.mpi
@pytest.mark.time_limit(60)
def test_ctrl_c_leaves_no_host_and_no_process() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "lowshard", "bench", "publish", "--size", "8M", "--rounds", "100000"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stderr is not None
    with process:
        try:
            while "round" not in process.stderr.readline():
                assert process.poll() is None
            mark = f"lowshard-{process.pid}-"
            names = [name for name in os.listdir("/run/netns") if name.startswith(mark)]
            asked = [["ip", "netns", "pids", name] for name in names]
            found = [subprocess.run(one, capture_output=True, text=True, check=True).stdout for one in asked]
            pids = " ".join(found).split()
            assert len(pids) >= 2
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait(20) == 130
        finally:
            process.kill()
    assert not [name for name in os.listdir("/run/netns") if name.startswith(mark)]
    assert wait_until(lambda: not [pid for pid in pids if Path("/proc", pid).exists()], 5.0)


def test_it_is_refused_inside_of_a_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert main(["bench", "publish"]) != 0
    assert "outside of an MPI job" in capsys.readouterr().err


@on_fake_hosts
@pytest.mark.time_limit(60)
def test_a_process_that_is_stopped_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_publish, "ANSWER_S", 5.0)
    stopped: list[int] = []

    def stop(pid: int) -> None:
        stopped.append(pid)
        os.kill(pid, signal.SIGSTOP)

    def stop_the_taker() -> None:
        for _ in range(400):
            for folder in Path("/proc").glob("[0-9]*"):
                words = _words(folder)
                if b"lowshard.bench.publish_side" in words and words[-1:] == [b"taker"] and _is_ours(folder):
                    stop(int(folder.name))
                    return
            threading.Event().wait(0.01)

    thread = threading.Thread(target=stop_the_taker)
    thread.start()
    assert main(["bench", "publish", "--size", "8M", "--rounds", "3"]) == 2
    thread.join()
    assert "has not answered within 5 s" in capsys.readouterr().err
    assert stopped
    assert wait_until(lambda: not Path("/proc", str(stopped[0])).exists(), 5.0)


def _words(folder: Path) -> list[bytes]:
    try:
        return (folder / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return []


def _is_ours(folder: Path) -> bool:
    """Say whether a process is Python and has this one among its parents."""
    parent = folder.name
    while parent not in ("0", "1", str(os.getpid())):
        try:
            parent = Path("/proc", parent, "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            return False
    return parent == str(os.getpid()) and b"python" in _words(folder)[0]
