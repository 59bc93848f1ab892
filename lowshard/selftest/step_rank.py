"""What each MPI rank of a step runs: `python -m lowshard.selftest.step_rank PART SETTING RESULT`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from lowshard import comm as lc
from lowshard.comm import Communicator
from lowshard.selftest.comparisons import Tally
from lowshard.selftest.device_arrays import array_module, fill_pools
from lowshard.selftest.step_setting import Setting, result_of

Part = Callable[[Communicator, Tally], None]


def _collectives(comm: Communicator, tally: Tally) -> None:
    from lowshard.selftest.every_collective import EveryCollective

    EveryCollective(comm, tally).run()


def _redistribute(comm: Communicator, tally: Tally) -> None:
    from lowshard.selftest.step_redistribute import move_everything

    move_everything(comm, tally)


def _refit(comm: Communicator, tally: Tally) -> None:
    from lowshard.selftest.step_refit import refit_everything

    refit_everything(comm, tally)


def _bandwidths(comm: Communicator, tally: Tally) -> None:
    from lowshard.selftest.step_bandwidths import measure_collectives

    measure_collectives(comm, tally)


PARTS: dict[str, Part] = {
    "collectives": _collectives,
    "redistribute": _redistribute,
    "refit": _refit,
    "bandwidths": _bandwidths,
}


def main(part: str, setting: Setting, result: Path) -> None:
    """Run a part as one rank and write what it found, also where it fails."""
    from lowshard.comm.mpi import load_mpi

    tally = Tally()
    world = load_mpi().COMM_WORLD
    try:
        if setting.device == "cuda":
            fill_pools(array_module("cuda"))
        with lc.from_mpi(world, setting.device, transport=setting.transport) as comm:
            tally.data["transport"] = comm.transport
            PARTS[part](comm, tally)
    finally:
        result_of(result, world.Get_rank()).write_text(tally.to_json(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Setting.from_json(sys.argv[2]), Path(sys.argv[3]))
