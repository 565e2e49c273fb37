"""Pre-train a GPT: ``torchrun --nproc-per-node N pretrain_gpt.py --config FILE [--flags]``; ``--help`` lists them.

`fp8-megatron train` checks the same flags first and then starts the ranks.
"""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("fp8_megatron") is None:  # a clone that is not installed, started from elsewhere
    sys.path.insert(0, str(Path(__file__).resolve().parent))

from fp8_megatron.commands.pretrain_gpt import main

if __name__ == "__main__":
    sys.exit(main())
