"""What each MPI rank of a step runs: `python -m lowshard.selftest.rank PART SETTING RESULT`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from lowshard import comm as lc
from lowshard.comm import Communicator
from lowshard.selftest.setting import Setting
from lowshard.selftest.tally import Tally

Part = Callable[[Communicator, Tally], None]


def _collectives(comm: Communicator, tally: Tally) -> None:
    from lowshard.selftest.every_collective import EveryCollective

    EveryCollective(comm, tally).run()


def _redistribute(comm: Communicator, tally: Tally) -> None:
    from lowshard.selftest.redistribute import move_everything

    move_everything(comm, tally)


def _refit(comm: Communicator, tally: Tally) -> None:
    from lowshard.selftest.refit import refit_everything

    refit_everything(comm, tally)


def _bandwidths(comm: Communicator, tally: Tally) -> None:
    from lowshard.selftest.bandwidths import measure_collectives

    measure_collectives(comm, tally)


PARTS: dict[str, Part] = {
    "collectives": _collectives,
    "redistribute": _redistribute,
    "refit": _refit,
    "bandwidths": _bandwidths,
}


def main(part: str, setting: Setting, result: Path) -> None:
    """Run a part as one rank; rank 0 writes what all ranks found."""
    from lowshard.comm.mpi import load_mpi

    tally = Tally()
    world = load_mpi().COMM_WORLD
    with lc.from_mpi(world, setting.device, transport=setting.transport) as comm:
        tally.data["transport"] = comm.transport
        PARTS[part](comm, tally)
        found = lc.share_text(comm.control, tally.to_json())
        if comm.rank == 0:
            result.write_text(json.dumps(list(found)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Setting.from_json(sys.argv[2]), Path(sys.argv[3]))
