"""A planned call as compiled code reads it: a row of int64 that says everything but where the buffers lie."""

from __future__ import annotations

import numpy as np

KIND, SIGNATURE, SEND_BYTES, RECV_BYTES, OVERLAP, FIRST = range(6)
"""Places of a row; from FIRST on lie the numbers that a kind takes beside these."""
ROW_WORDS = 16

(
    BARRIER, GATHER_SLOTS, GATHER_BUFFERS, COLLECT, SPREAD, EXCHANGE, FOLD_SLOTS, FOLD_BUFFERS, SEND, RECEIVE,
    SEND_RECEIVE, DEAL, FOLD_AT_ROOT,
) = range(13)  # fmt: skip
"""Kinds; each is the function of that name in `move`, `fold`, `fold_shown` or `channel`."""

APART, OWN_PART_ONLY, ANY = range(3)
"""How send and recv may lie over each other: not at all; as one, or one as this rank's part of the other; anyhow."""


def row_of(
    kind: int, signature: int, send_bytes: int, recv_bytes: int, overlap: int, *numbers: int
) -> np.ndarray:
    """Return the row of a call; it must live as long as its address is used."""
    row = np.zeros(ROW_WORDS, np.int64)
    head = (kind, signature, send_bytes, recv_bytes, overlap, *numbers)
    row[: len(head)] = head
    return row
