"""What programs do with a communicator, on threads: the table of support.program_cases."""

from __future__ import annotations

import pytest
from support import mode
from support.comm_kit import Way, cases_for, run_case
from support.program_cases import PROGRAMS

from lowshard import comm as lc


@pytest.mark.parametrize(
    ("name", "size"),
    [
        (name, size)
        for size in ([1, 2, 3, 4, 8] if mode.full() else [3])
        for name in cases_for(Way(size, "loopback"), PROGRAMS)
    ],
)
@pytest.mark.whole
def test_programs_are_right_on_threads(name: str, size: int) -> None:
    lc.run_loopback(size, lambda comm: run_case(name, comm), timeout_s=60.0)
