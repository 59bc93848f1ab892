"""Functions that NumPy lacks."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray


def erf(x: NDArray[Any]) -> NDArray[np.float64]:
    """Return the error function, in float64, within 1e-10.

    Third-order Taylor steps from a table of `math.erf` at multiples of 1/128: with |step| <= 1/256 the
    first term left out is below 4e-11, and there are no constants to trust. Beyond 6 erf is 1 within 3e-17.
    """
    values, slopes = _erf_table()
    x = np.asarray(x, dtype=np.float64)
    a = np.minimum(np.abs(x), _ERF_END)
    # fmin lets a NaN index the last entry; its distance is still NaN, and so is the result.
    node = np.rint(np.fmin(a, _ERF_END) * _ERF_STEPS).astype(np.intp)
    x0 = node / _ERF_STEPS
    d = a - x0
    series = d * (1.0 - d * (x0 - d * ((2.0 * x0 * x0 - 1.0) / 3.0)))
    out: NDArray[np.float64] = np.copysign(values[node] + slopes[node] * series, x)
    return out


_ERF_STEPS = 128
_ERF_END = 6.0


@cache
def _erf_table() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    nodes = [i / _ERF_STEPS for i in range(int(_ERF_END * _ERF_STEPS) + 1)]
    slopes = [2.0 / math.sqrt(math.pi) * math.exp(-t * t) for t in nodes]
    return np.array([math.erf(t) for t in nodes]), np.array(slopes)
