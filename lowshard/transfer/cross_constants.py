"""Limits that both sides of a call into another process's memory know."""

MOST_PLACES = 1024
"""Stretches of memory that one call takes on either side (IOV_MAX)."""
LONG_BYTES = 8 << 10
"""Runs from here on are worth a stretch of their own; shorter ones that lie side by side are read as one."""
