"""Join token files: `python tools/merge_datasets.py --help`, or `fp8-megatron merge`."""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("fp8_megatron") is None:  # a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fp8_megatron.commands.merge_datasets import main
from fp8_megatron.commands.program import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(main))
