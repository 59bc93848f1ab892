"""`lowshard selftest`: does this installation work here, and how fast.

`steps` lists the steps, `runner` runs each in a process of its own; the cases of `*_cases` are the tests' too.
"""
