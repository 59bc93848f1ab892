"""The CUDA kernels: sources, and the engine that runs them on CuPy arrays."""
