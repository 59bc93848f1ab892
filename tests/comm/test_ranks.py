"""The communicator contract on real MPI ranks: the case table, and what only MPI does."""

from __future__ import annotations

import re
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from support import mode
from support.case_table import LIMIT_S, cases_of_jobs, check_case, some_cases
from support.starting import Finished, RanksTimedOut, start_ranks

pytestmark = pytest.mark.mpi

HERE = Path(__file__).parent


ON_RANKS = some_cases(24, "on ranks")  # tests/comm/test_loopback.py has all of them, on threads


@pytest.mark.time_limit(LIMIT_S + 30)  # the first case of a size waits for all of them
@pytest.mark.parametrize(
    ("name", "size"), cases_of_jobs([2, 3, 4, 8] if mode.full() else [3], names=ON_RANKS)
)
def test_the_contract_holds_on_mpi_ranks(name: str, size: int) -> None:
    check_case(name, size, "cpu", ON_RANKS)


NODES = [(3, 2), *([(4, 2), (8, 4)] if mode.full() else [])]
"""Ranks, ranks of a node."""


ON_NODES = some_cases(10, "several nodes")


@pytest.mark.time_limit(LIMIT_S + 30)
@pytest.mark.parametrize(
    ("name", "size", "node_size"),
    [
        (name, size, node_size)
        for size, node_size in NODES
        for name, _ in cases_of_jobs([size], "cpu", ON_NODES, LOWSHARD_NODE_SIZE=str(node_size))
    ],
)
@pytest.mark.full_only
def test_the_contract_holds_on_several_nodes(name: str, size: int, node_size: int) -> None:
    check_case(name, size, "cpu", ON_NODES, LOWSHARD_NODE_SIZE=str(node_size))


def test_ranks_on_all_nodes_learn_of_a_failure(tmp_path: Path) -> None:
    ended = run(
        tmp_path,
        """
        import numpy as np
        from mpi4py import MPI
        from lowshard import comm as lc
        from lowshard.errors import PeerFailed

        comm = lc.from_mpi(MPI.COMM_WORLD, "cpu")
        assert len(comm.reach.peers) == 2
        buf = np.ones(10000)
        try:
            for number in range(4):
                if number == 3 and comm.rank == 3:
                    raise ValueError("boom")
                comm.all_reduce(buf, buf)
        except PeerFailed as error:
            print(error, flush=True)
            raise
        """,
        n=4, prefix_output=True, env={"LOWSHARD_NODE_SIZE": "2", "LOWSHARD_CHECK": "off"},
    )  # fmt: skip
    assert ended.returncode == 1, ended.text
    for rank in range(3):  # those of the other node may still be ending the call before
        told = rf"^\[{rank}\] rank 3 failed: ValueError: boom; this rank was in all_reduce#[34] "
        assert re.search(told, ended.stdout, re.M), ended.text


@pytest.mark.parametrize("node_size", mode.sample(["", "2"], 1, "made and closed"))
def test_communicators_that_are_made_and_closed_leave_no_threads_and_descriptors(
    tmp_path: Path, node_size: str
) -> None:
    ended = run(
        tmp_path,
        """
        import os, threading
        import numpy as np
        from mpi4py import MPI
        from lowshard import comm as lc

        def held():
            world = MPI.COMM_WORLD
            half = world.Split(world.rank % 2, -world.rank)
            for over in (world, half):
                with lc.from_mpi(over, "cpu") as comm:
                    ones = np.ones(20_000)
                    comm.all_reduce(ones, ones)
                    assert (ones == comm.size).all()
            half.Free()
            return threading.active_count(), len(os.listdir("/proc/self/fd"))

        first = [held() for _ in range(2)][-1]
        assert [held() for _ in range(10)][-1] == first, first
        print("done")
        """,
        n=4, prefix_output=True, env={"LOWSHARD_NODE_SIZE": node_size},
    )  # fmt: skip
    assert sorted(ended.ok().stdout.splitlines()) == [f"[{rank}] done" for rank in range(4)], ended.text


@pytest.mark.parametrize("size", mode.sample([2, 4], 1, "MPI only"))
def test_what_only_the_mpi_communicator_does(size: int) -> None:
    ended = start_ranks(HERE / "run_mpi_only.py", size, timeout_s=60).ok()
    assert len(ended.stdout.split()) == 6, ended.text


# ---- the starter itself, which all tests on MPI ranks rely on


def write(folder: Path, text: str) -> Path:
    script = folder / "script.py"
    script.write_text(textwrap.dedent(text))
    return script


def run(folder: Path, text: str, n: int = 2, **options: Any) -> Finished:
    return start_ranks(write(folder, text), n, timeout_s=60, **options)


def test_ranks_import_what_this_test_imports(tmp_path: Path) -> None:
    ended = run(
        tmp_path,
        "import lowshard, support.comm_kit, sys\nfrom mpi4py import MPI\n"
        "print(MPI.COMM_WORLD.size, lowshard.__file__, *sys.argv[1:])\n",
        args=["one", "2"],
        prefix_output=True,
    ).ok()
    import lowshard

    assert sorted(ended.stdout.splitlines()) == [f"[{r}] 2 {lowshard.__file__} one 2" for r in range(2)]


def test_a_failing_rank_ends_the_job_and_shows_its_traceback(tmp_path: Path) -> None:
    ended = run(
        tmp_path,
        "from mpi4py import MPI\nif MPI.COMM_WORLD.rank == 1:\n    raise ValueError('boom')\n"
        "MPI.COMM_WORLD.Barrier()\n",
        n=3,
    )
    assert ended.returncode == 1
    assert "ValueError: boom" in ended.stderr
    with pytest.raises(AssertionError, match="rank 1 failed first"):
        ended.ok()


def test_ranks_that_hang_are_ended_and_show_their_stacks(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "from mpi4py import MPI\ndef waits_for_nobody():\n    MPI.COMM_WORLD.Recv(bytearray(1), 0)\n"
        "def comes_never():\n    import time\n    time.sleep(99)\n"
        "waits_for_nobody() if MPI.COMM_WORLD.rank else comes_never()\n",
    )
    with pytest.raises(RanksTimedOut) as caught:
        start_ranks(script, 2, timeout_s=3, prefix_output=True)
    text = str(caught.value)
    assert re.search(r"\[0\].*in comes_never", text)
    assert re.search(r"\[1\].*in waits_for_nobody", text)


def test_leaving_a_with_block_by_an_error_waits_for_no_other_rank(tmp_path: Path) -> None:
    ended = run(
        tmp_path,
        """
        from mpi4py import MPI
        from lowshard import comm as lc

        with lc.from_mpi(MPI.COMM_WORLD, "cpu") as well:
            pass
        assert well._transport.mailbox.mpi_comm == MPI.COMM_NULL
        try:
            with lc.from_mpi(MPI.COMM_WORLD, "cpu") as failed, failed.split(0) as group:
                raise ValueError("on every rank, or on one")
        except ValueError:
            assert failed._transport.mailbox.mpi_comm != MPI.COMM_NULL, "freed, which is collective"
            assert group._transport.mailbox.mpi_comm != MPI.COMM_NULL
        if MPI.COMM_WORLD.rank == 0:
            print("left well")
        """,
    ).ok()
    assert "left well" in ended.stdout


def test_a_rank_that_raises_inside_a_with_block_ends_the_job(tmp_path: Path) -> None:
    begun = time.monotonic()
    ended = run(
        tmp_path,
        """
        from mpi4py import MPI
        from lowshard import comm as lc

        with lc.from_mpi(MPI.COMM_WORLD, "cpu") as comm, comm.split(0) as group:
            if comm.rank == 1:
                raise ValueError("boom in the block")
            group.barrier()
        """,
    )
    assert ended.returncode == 1
    assert "ValueError: boom in the block" in ended.stderr
    assert "rank 1" in ended.stderr
    assert time.monotonic() - begun < 5
