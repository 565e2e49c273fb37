"""Continue prompts with a trained checkpoint.

    fp8-megatron generate --load runs/quickstart/checkpoints --prompt "def " "class "

A checkpoint of several tensor-parallel ranks runs on as many GPUs of this node, or on the CPU if there is no GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import unicodedata
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ..config.words import flag_with
from .arguments import Parser, existing, real, seed, whole
from .environment import check_launcher, follow_parent, launched_ranks
from .launch import NodeRanks, check_gpus, run_ranks
from .program import exit_status, prepare_megatron

#: A token takes a forward pass over the whole context, so more would take days.
MAX_TOKENS = 1_000_000
#: The lowest and the highest temperature. Below it scaled logits leave FP32; above, draws are uniform.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 1e6


def main(words: Sequence[str] | None = None, prog: str = "generate_text.py") -> int:
    """Exit status: 0, or 2 after an error."""
    follow_parent()
    words = list(sys.argv[1:] if words is None else words)
    return exit_status(partial(_run, parse_arguments(words, prog), words))


def parse_arguments(words: Sequence[str], prog: str) -> argparse.Namespace:
    """The command line."""
    parser = Parser(prog=prog, description=__doc__)
    parser.add_argument(
        "--load", type=existing, required=True, help="folder that training saved into, or one of its iter_* folders"
    )
    parser.add_argument("--prompt", nargs="+", required=True, type=_prompt, help="texts to continue")
    parser.add_argument("--num-tokens", type=whole(most=MAX_TOKENS), default=48, help="tokens to add (default 48)")
    parser.add_argument(
        "--temperature",
        type=real(least=MIN_TEMPERATURE, most=MAX_TEMPERATURE, or_zero=True),
        default=0.7,
        help="0 takes the most likely token (default 0.7)",
    )
    parser.add_argument("--top-k", type=whole(), help="draw among this many tokens (default 40)")
    parser.add_argument("--seed", type=seed, help="of the draw (default 0)")
    arguments = parser.parse_args(words)
    for name, default in (("top_k", 40), ("seed", 0)):
        value = getattr(arguments, name)
        if arguments.temperature == 0 and value is not None:
            parser.error(f"{flag_with(name, value)}: --temperature 0 draws nothing; leave one of them out")
        setattr(arguments, name, default if value is None else value)
    return arguments


def _prompt(word: str) -> str:
    """A text that a tokenizer takes. Bytes of the command line that are not UTF-8 arrive as lone surrogates."""
    try:
        word.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(
            f"{word[:60]!r} is not UTF-8 at character {error.start}; give the text in UTF-8"
        ) from error
    return word


def _run(arguments: argparse.Namespace, words: list[str]) -> int:
    rank, _ = launched_ranks(os.environ)
    check_launcher(os.environ)
    num_ranks = 1 if "WORLD_SIZE" in os.environ else _tensor_parallel_size(arguments.load)
    if num_ranks > 1:
        return _run_ranks(num_ranks, words)
    warnings.filterwarnings("ignore")
    prepare_megatron()
    from ..training.generate import generate_text

    texts = generate_text(
        arguments.load,
        arguments.prompt,
        num_tokens=arguments.num_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        seed=arguments.seed,
    )
    if rank == 0:
        for prompt, text in zip(arguments.prompt, texts, strict=True):
            print(f"--- prompt {prompt!r}\n{_without_controls(text)}")
    return 0


def _without_controls(text: str) -> str:
    """`text` with an escape for each control character but line breaks and tabs, which a terminal would obey."""
    return "".join(
        repr(character)[1:-1] if unicodedata.category(character) == "Cc" and character not in "\n\t" else character
        for character in text
    )


def _tensor_parallel_size(checkpoint_root: Path) -> int:
    """Ranks that the latest checkpoint needs. 1 if there is no checkpoint; `generate_text` reports that."""
    from ..checkpoint.files import CONFIG, candidates, iteration_folder, named_checkpoint
    from ..checkpoint.manifest import check_files
    from ..config.io import load_config

    root, iteration = named_checkpoint(checkpoint_root)
    iterations = candidates(root, iteration)
    if not iterations:
        return 1
    folder = iteration_folder(root, iterations[0])
    check_files(folder, (CONFIG,))
    config = load_config(folder / CONFIG)
    return config.parallel.tensor_model_parallel_size


def _run_ranks(num_ranks: int, words: list[str]) -> int:
    import torch

    placement = NodeRanks(num_ranks, on_cpu=not torch.cuda.is_available())
    check_gpus(placement)
    return run_ranks("fp8_megatron.commands.generate_text", words, placement)


if __name__ == "__main__":
    sys.exit(main())
