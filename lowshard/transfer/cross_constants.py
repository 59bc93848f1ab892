"""What both sides of a call into another process's memory know: limits, and columns of a strip.

A strip is what a holder takes of each row of a sheet, as int64.
"""

COLUMNS = 8
RANK, BLOCK, LOW, HIGH, NEAR, FAR, STEP, RUN = range(COLUMNS)
"""See `lowshard.weights.peer_write.Sheet.strips`."""
PID, AT = RANK, BLOCK
"""In their place once it is known where the block lies: the process (0: this one) and the address there."""
MOST_PLACES = 1024
"""Stretches of memory that one call takes on either side (IOV_MAX)."""
LONG_BYTES = 8 << 10
"""Runs from here on are worth a stretch of their own; shorter ones that lie side by side are read as one."""
