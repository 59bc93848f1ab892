"""Measurements: how fast this machine copies, and what lowshard reaches beside it."""
