"""Shardings of other libraries as layouts, and back: `lowshard.interop.torch` and `lowshard.interop.jax`.

Neither library is imported before a function of its module is called.
"""
