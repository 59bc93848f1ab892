"""What each rank that a benchmark starts runs: `python -m lowshard.bench.bench_rank MODULE:FUNCTION REQUEST RESULT`."""

from __future__ import annotations

import sys
from pathlib import Path

from lowshard.bench.bench_world import run_as_child

if __name__ == "__main__":
    run_as_child(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
