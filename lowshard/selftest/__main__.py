"""Runs one step in this process: `python -m lowshard.selftest STEP SETTING RESULT`, as the runner does."""

from __future__ import annotations

import faulthandler
import importlib
import sys
import traceback
from pathlib import Path

from lowshard.selftest.comparisons import Tally
from lowshard.selftest.steps import STEPS, Setting

_STACKS_BEFORE_S = 3.0
"""Before the step's limit all threads' stacks go into the log."""


def main(name: str, setting: Setting, result: Path) -> None:
    """Run a step and write its tally; what it raises is a finding."""
    module, function = next(step.run for step in STEPS if step.name == name).split(":")
    faulthandler.dump_traceback_later(max(1.0, setting.limit_s - _STACKS_BEFORE_S))
    tally = Tally()
    try:
        getattr(importlib.import_module(f"lowshard.selftest.{module}"), function)(setting, tally)
    except Exception as error:
        traceback.print_exc()
        notes = "; ".join(getattr(error, "__notes__", ()))
        tally.fail(f"{type(error).__name__}: {error}{f' ({notes})' if notes else ''}")
    result.write_text(tally.to_json(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Setting.from_json(sys.argv[2]), Path(sys.argv[3]))
