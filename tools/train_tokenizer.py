"""Train a SentencePiece tokenizer on text: `python tools/train_tokenizer.py --help`, or `fp8-megatron tokenize`."""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("fp8_megatron") is None:  # a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fp8_megatron.commands.program import exit_status
from fp8_megatron.commands.train_tokenizer import main

if __name__ == "__main__":
    sys.exit(exit_status(main))
