"""A rank that ends at once: ``python -m tests.harness.ending_rank STATUS TEXT``; for tests of launchers."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    if os.environ["RANK"] == "0":
        print(sys.argv[2], file=sys.stderr, flush=True)
    sys.exit(int(sys.argv[1]))
