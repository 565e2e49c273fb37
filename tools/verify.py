"""Run or make verification cards: `python tools/verify.py --help`, or `fp8-megatron verify`."""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("fp8_megatron") is None:  # a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fp8_megatron.commands.program import exit_status
from fp8_megatron.commands.verify import main

if __name__ == "__main__":
    sys.exit(exit_status(main))
