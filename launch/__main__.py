"""`python -m lowshard.launch run`: as `lowshard run`; all other commands too."""

from __future__ import annotations

import sys

from lowshard.cli import main

if __name__ == "__main__":
    sys.exit(main())
