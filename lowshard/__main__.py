"""`python -m lowshard` is the `lowshard` command."""

from __future__ import annotations

import sys

from lowshard.cli import main

if __name__ == "__main__":
    sys.exit(main())
