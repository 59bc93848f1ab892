"""Runs examples one after the other in one MPI job, and writes what rank 0 printed: OUT.json FILE..."""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
from pathlib import Path

from mpi4py import MPI

out, *files = sys.argv[1:]
printed = {}
for file in files:
    sys.argv = [file]
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        runpy.run_path(file, run_name="__main__")
    printed[file] = text.getvalue()
    MPI.COMM_WORLD.Barrier()
if MPI.COMM_WORLD.rank == 0:
    Path(out).write_text(json.dumps(printed), encoding="utf-8")
