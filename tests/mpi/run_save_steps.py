"""Run by every rank of a job: one save of version 2 in which a rank fails or is killed; or many that only fail.

Arguments: what to do, a saver, its folder, the rank it is about, and

    count                the folder gets `steps.json`, the names of the rank's steps
    fail AT FAULT        the fault comes at that step; each rank that lives writes how its save ended
    many CASES           a JSON list of (start from nothing, step, fault) in turn, each judged by rank 0
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mpi4py import MPI
from support.save_steps import Steps, watched
from support.savers import SAVERS, Ended, attempt, judge

from lowshard import comm as lc
from lowshard.comm import Communicator, share_text

task, name, folder, victim = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
saver = SAVERS[name](folder)


def write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def many(comm: Communicator) -> None:
    """Let the save fail in many ways in turn; all ranks are told of each, so the job goes on."""
    saver.prepare() if comm.rank == 0 else None
    committed = 0
    cases = json.loads(sys.argv[5])
    for fresh, at, fault in cases:
        before, files = 0, set[str]()
        if comm.rank == 0:
            saver.start(fresh=fresh)
            before, files = saver.inode(), saver.files()
        comm.barrier()
        steps = Steps(at, fault)
        error = attempt(saver, comm, victim, steps)
        said = share_text(comm.control, json.dumps([asdict(Ended.of(error)), steps.names]))
        rows = [json.loads(text) for text in said]
        if comm.rank == 0:
            ended, names = [Ended(**row[0]) for row in rows], rows[victim][1]
            try:
                assert len(names) >= at
                told = names[at - 1] not in ("unlink", "rmdir")
                committed += judge(saver, before, files, ended, told=told)
            except BaseException as failure:
                failure.add_note(
                    f"{name}: {fault} at step {at} of rank {victim}, fresh={fresh}: {names}; {ended}"
                )
                raise
    if comm.rank == 0:
        write(folder / "many.json", [len(cases), committed])


with lc.from_mpi(MPI.COMM_WORLD, device="cpu") as world, watched(saver.place, type(world.control._transport)):
    if task == "many":
        many(world)
    else:
        counts = Steps(int(sys.argv[5]), sys.argv[6]) if task == "fail" else Steps()
        found = attempt(saver, world, victim, counts)
        write(folder / f"ended{world.rank}.json", asdict(Ended.of(found)))
        if world.rank == victim:
            write(folder / "steps.json", counts.names)
        if found is not None:
            raise found
