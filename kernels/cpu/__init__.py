"""The CPU engine: Numba kernels whose inner steps are explicit vector code."""
