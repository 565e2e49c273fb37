"""Plan layouts on a cluster: `python tools/plan.py --help`, or `fp8-megatron plan`."""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("fp8_megatron") is None:  # a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fp8_megatron.commands.plan import main
from fp8_megatron.commands.program import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(main))
