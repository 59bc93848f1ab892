"""The ranks of one machine in shared memory: compiled by Numba, imported where it is used."""
