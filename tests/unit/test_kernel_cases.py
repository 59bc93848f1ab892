"""The selftest's cases of kernels, through every engine that is not plain: the bytes of the plain one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from support import engines

from lowshard.selftest.arrays import put
from lowshard.selftest.comparisons import Tally
from lowshard.selftest.kernel_cases import FAMILIES, KernelCase

engine = engines.fixture([label for label in engines.LABELS if label != "plain"])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_of_kernels_has_the_bytes_of_its_plain_twins(
    engine: Any, family: Callable[[], Iterator[KernelCase]]
) -> None:
    tally = Tally()
    for case in family():
        case.check(partial(put, np), tally)
    assert not tally.findings
    assert tally.checks > 10
