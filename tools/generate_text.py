"""Continue prompts with a trained checkpoint.

torchrun --nproc-per-node TP tools/generate_text.py --load runs/quickstart/checkpoints --prompt "def " "class "
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from pathlib import Path


def main() -> int:
    """Print the continuations; returns the exit status."""
    parser = argparse.ArgumentParser(description="Continue prompts with a trained checkpoint.")
    parser.add_argument("--load", type=Path, required=True, help="folder that training saved into")
    parser.add_argument("--prompt", nargs="+", required=True, help="texts to continue")
    parser.add_argument("--num-tokens", type=int, default=48, help="tokens to add (default 48)")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 takes the most likely token (default 0.7)")
    parser.add_argument("--top-k", type=int, default=40, help="draw among this many tokens (default 40)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    # megatron-core warns on import of what it does without; none of that is used here.
    warnings.filterwarnings("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    from fp8_megatron.checkpoint.files import CheckpointError
    from fp8_megatron.config.checks import ConfigError
    from fp8_megatron.training.generate import generate_text

    is_first = int(os.environ.get("RANK", "0")) == 0
    try:
        texts = generate_text(
            args.load,
            args.prompt,
            num_tokens=args.num_tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            seed=args.seed,
        )
    except (CheckpointError, ConfigError) as error:
        if is_first:
            print(f"error: {error}", file=sys.stderr)
        return 1
    if is_first:
        for prompt, text in zip(args.prompt, texts, strict=True):
            print(f"--- prompt {prompt!r}\n{text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
