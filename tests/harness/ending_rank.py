"""The first rank says why it ends, and ends: ``python -m tests.harness.ending_rank STATUS TEXT``.

For tests of launchers. The others run on until the launcher ends them. If they ended too, the first might be ended
before it spoke.
"""

from __future__ import annotations

import os
import sys
import time

if __name__ == "__main__":
    if os.environ["RANK"] != "0":
        time.sleep(200)
    print(sys.argv[2], file=sys.stderr, flush=True)
    sys.exit(int(sys.argv[1]))
