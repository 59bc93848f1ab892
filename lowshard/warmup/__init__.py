"""All of lowshard's compiled functions: compiled ahead of their use, by a command or when the package is built."""
