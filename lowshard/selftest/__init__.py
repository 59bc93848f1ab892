"""`lowshard selftest`: does this installation work here, and how fast.

A list of steps (`step.STEPS`), each in a process of its own under its own time limit (`runner`). What a step does
lies in a module of its own; `child` runs one, `rank` is what each MPI rank of one runs. Every result is compared with
plain NumPy, bit for bit (`tally`). It needs no pytest and none of the tests.
"""
