"""The console script `fp8-megatron`: one command with a subcommand for each task."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module

from . import __version__
from .commands.program import exit_status
from .errors import UserError


@dataclass(frozen=True)
class Command:
    """A subcommand: the module in `commands` that has its `main`, and one line of help."""

    module: str
    help: str


COMMANDS = {
    "demo": Command("demo", "train a tiny GPT in BF16 and in FP8 side by side, in two minutes on a CPU"),
    "train": Command("train", "train a GPT on this node's GPUs, or on its CPU"),
    "tokenize": Command("train_tokenizer", "train a SentencePiece tokenizer on text"),
    "preprocess": Command("preprocess_data", "turn text into token files"),
    "merge": Command("merge_datasets", "join token files"),
    "convert": Command("convert_checkpoint", "convert a checkpoint: this project's, megatron-core's, Hugging Face's"),
    "inspect": Command("inspect_checkpoint", "show what a checkpoint holds, and verify its files"),
    "generate": Command("generate_text", "continue prompts with a trained checkpoint"),
    "plot": Command("plot_losses", "draw the losses of one run, or compare the curves of several"),
    "health": Command("health", "show a run's FP8 health as one HTML page, or serve it while the run goes on"),
    "parity": Command("parity", "train one configuration at several precision levels, and compare the losses"),
    "plan": Command("plan", "predict the best layouts of a model on a cluster: memory and step time"),
    "verify": Command("verify", "run a verification card again, and say within what it agrees; or make one"),
}


def main(words: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit status. An error in any of them is one line on stderr."""
    return exit_status(partial(_main, words))


def _main(words: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="fp8-megatron",
        usage="fp8-megatron COMMAND [flags]",
        description="LLM pre-training with FP8 end to end.\n\ncommands:\n"
        + "\n".join(f"  {name:<11} {command.help}" for name, command in COMMANDS.items())
        + "\n\nfp8-megatron COMMAND --help has the flags of each; docs/ and configs/ of the repository have the rest.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("command", nargs="?", metavar="COMMAND", help=argparse.SUPPRESS)
    parser.add_argument("flags", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    given = sys.argv[1:] if words is None else words
    if given and given[0].startswith("-") and given[0] not in ("-h", "--help", "--version"):
        raise UserError(f"{given[0]} stands before the command; write fp8-megatron COMMAND {given[0]} …")
    arguments = parser.parse_args(given)
    if arguments.command not in COMMANDS:
        raise UserError(_about(arguments.command))
    module = import_module(f"{__package__}.commands.{COMMANDS[arguments.command].module}")
    status: int = module.main(arguments.flags, prog=f"fp8-megatron {arguments.command}")
    return status


def _about(word: str | None) -> str:
    """What to do about a word that is no command."""
    names = f"give one of {', '.join(COMMANDS)} (fp8-megatron --help says what they do)"
    if word is None:
        return f"no command; {names}"
    nearest = difflib.get_close_matches(word, COMMANDS, n=1)
    return f"unknown command {word!r}; " + (f"did you mean {nearest[0]}?" if nearest else names)


if __name__ == "__main__":
    sys.exit(main())
