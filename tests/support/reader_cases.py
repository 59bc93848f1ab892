"""A process that reads damaged data and prints what came of it: bounded in memory, each case in time."""

from __future__ import annotations

import json
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from support import outside_data
from support.mutation import as_text, mutated, planted, spoilt

from lowshard.errors import LowshardError
from lowshard.reading import READERS

MOST_BYTES, MOST_S = 256 << 20, 2.0


def main(kind: str, name: str, cases: int, seed: int) -> int:
    """Run the cases of one reader or text format; print counts as JSON; return 1 at the first wrong one."""
    outside_data.import_everything()
    if kind == "reader":
        sample = outside_data.samples()[name]
    else:
        make, use = outside_data.texts()[name]
        sample = make()
    bound = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
    signal.signal(signal.SIGALRM, _late)
    refused, slowest = 0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name.replace(" ", "_")
        for case in range(cases):
            rng = random.Random(f"{seed} {name} {case}")
            signal.setitimer(signal.ITIMER_REAL, 5 * MOST_S)  # five times: others may use the machine
            cpu = time.process_time()
            try:
                if kind == "reader":
                    outside_data.use(name, _read(name, sample, case, rng))
                else:
                    path.write_bytes(_damaged(name, sample, rng) if case else sample)
                    use(path)
            except LowshardError as error:
                refused += 1
                assert case or kind == "reader", "a sound file was refused"
                if isinstance(error.__cause__, MemoryError) or len(str(error)) > 20_000:
                    print(f"{name}: case {case} of seed {seed}: {str(error)[:500]}", file=sys.stderr)
                    return 1
            except BaseException:
                print(f"{name}: case {case} of seed {seed}", traceback.format_exc()[-3000:], file=sys.stderr)
                return 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            took = time.process_time() - cpu
            slowest = max(slowest, took)
            if took > MOST_S:
                print(f"{name}: case {case} of seed {seed} took {took:.1f} s", file=sys.stderr)
                return 1
    print(json.dumps({"cases": cases, "refused": refused, "slowest_s": round(slowest, 3)}))
    return 0


def _read(name: str, sample: Any, case: int, rng: random.Random) -> Any:
    if case % 3 == 2:
        return READERS[name].text(spoilt(as_text(sample), rng).decode("latin-1"))
    data = mutated(sample, rng)
    return READERS[name](data) if case % 3 else READERS[name].text(as_text(data).decode())


def _damaged(name: str, text: bytes, rng: random.Random) -> bytes:
    # Few of the texts are JSON when bytes of them have changed.
    if name.endswith(".json") and rng.random() < 0.7:
        return as_text(mutated(json.loads(text), rng))
    if name in (".metadata", "__0_0.distcp") and rng.random() < 0.1:
        return planted(text, rng)
    return spoilt(text, rng)


def _late(*_: object) -> None:
    raise TimeoutError("the case is not over")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
