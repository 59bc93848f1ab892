"""Columns of a strip: what a holder takes of each row of a sheet, as int64."""

COLUMNS = 8
RANK, BLOCK, LOW, HIGH, NEAR, FAR, STEP, RUN = range(COLUMNS)
"""See `lowshard.weights.peer_write.Sheet.strips`."""
PID, AT = RANK, BLOCK
"""In their place once it is known where the block lies: the process (0: this one) and the address there."""
MOST_PLACES = 1024
"""Stretches of memory that one call takes on either side (IOV_MAX)."""
