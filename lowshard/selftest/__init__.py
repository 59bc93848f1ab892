"""`lowshard selftest`: does this installation work here, and how fast.

`steps` lists the steps; `runner` runs each in a process of its own under its own time limit, `python -m
lowshard.selftest`, which calls `run` of the step's module. The modules named `*_cases` hold the cases; the tests run
them too. Every result is compared with plain NumPy, bit for bit (`comparisons`). Neither pytest nor tests are needed.
"""
