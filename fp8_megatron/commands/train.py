"""Train a GPT on this node's GPUs. Checks the configuration within a second, then starts one rank per GPU.

A mistake in a flag or a file prints one line and exits with status 2 before any rank starts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ..config.checks import check_config
from ..config.folder_checks import check_run_folders
from ..config.io import parse_config
from ..data.token_files import check_input_files
from ..errors import UserError
from .arguments import Parser, nonempty, note_repeated_flags, whole
from .dry_run import dry_run
from .environment import follow_parent
from .launch import NodeRanks, check_cpu_ranks, check_gpus, hide_gpus, run_ranks, slurm_launch
from .program import exit_status, tell
from .run_settings import run_command_line

#: Restarts of --restart. A fault that comes again at the same iteration ends the job sooner.
_DEFAULT_RESTARTS = 10
_RANK_PROGRAM = "fp8_megatron.commands.pretrain_gpt"
_EXAMPLES = """\
examples:
  {prog} --config configs/gpt_345m.yaml --mock-data --train-iters 20
  {prog} --gpus 4 --config configs/gpt_7b.yaml configs/fast.yaml --data-path PREFIX --tokenizer-model FILE
  {prog} --cpu-ranks 2 --config configs/gpt_quickstart.yaml
  {prog} --gpus 8 --restart --config configs/gpt_7b.yaml ... --save DIR --save-interval 500
  on each of two nodes, N = 0 and 1:
  {prog} --gpus 8 --nnodes 2 --node-rank N --master-addr HOST --config configs/gpt_13b.yaml ...
"""


def main(words: Sequence[str] | None = None, prog: str = "fp8-megatron train") -> int:
    """Exit status: 2 after a user's error, otherwise the job's."""
    follow_parent()
    return exit_status(partial(_main, list(sys.argv[1:] if words is None else words), prog))


def _main(words: list[str], prog: str) -> int:
    parser = _parser(prog)
    own, flags = parser.parse_known_args(words)
    note_repeated_flags(_words_of(parser, words))
    if "-h" in flags or "--help" in flags:
        parser.print_help()
        print("\nEvery other flag is the model's, the data's or the run's:\n", flush=True)
        parse_config(["--help"], prog=prog)
    placement = _placement(own)
    command_line = run_command_line(flags, prog)
    config = command_line.config
    if command_line.dry_run:
        for line in command_line.notes:
            tell(f"note: {line}")
        dry_run(command_line, placement.world_size)
        return 0
    command_line.check_no_world_size()
    check_config(config, placement.world_size)
    check_run_folders(config)
    check_input_files(config)
    if placement.world_size == 1 and placement.max_restarts == 0:
        return _train_here(flags, prog, placement, exact=own.gpus is not None)
    check_gpus(placement)
    folder = config.logging.output_dir or config.checkpoint.save
    return run_ranks(_RANK_PROGRAM, flags, placement, folder=None if folder is None else Path(folder))


def _words_of(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """The words that `parser` takes: its flags, and the value after each."""
    mine = [word.partition("=")[0] in parser._option_string_actions for word in words]
    return [word for index, word in enumerate(words) if mine[index] or (index and mine[index - 1])]


def _train_here(flags: list[str], prog: str, placement: NodeRanks, *, exact: bool) -> int:
    """Train on a single rank, in this process, without a launcher."""
    from . import pretrain_gpt

    if placement.on_cpu:
        hide_gpus()
    elif exact:
        check_gpus(placement)
    return pretrain_gpt.main(flags, prog=prog)


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = Parser(
        prog=prog,
        usage=f"{prog} [--gpus N | --cpu-ranks N] [--nnodes N --node-rank N --master-addr HOST] [flags]",
        description=__doc__,
        epilog=_EXAMPLES.format(prog=prog),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    ranks = parser.add_mutually_exclusive_group()
    ranks.add_argument(
        "--gpus",
        type=whole(least=0),
        metavar="N",
        help="GPUs of this node, a rank each; 0: one rank on the CPU (default: 1 if there is one)",
    )
    ranks.add_argument("--cpu-ranks", type=whole(), metavar="N", help="ranks on this node's CPU instead, over gloo")
    parser.add_argument(
        "--nnodes", type=whole(), default=1, metavar="N", help="nodes (default 1), all with as many GPUs"
    )
    parser.add_argument(
        "--node-rank", type=whole(least=0), default=0, metavar="N", help="this node's number, from 0 (default 0)"
    )
    parser.add_argument("--master-addr", type=nonempty, metavar="HOST", help="node 0, for several nodes")
    parser.add_argument(
        "--master-port", type=whole(most=65_535), metavar="PORT", help="a free port there (default 29500)"
    )
    restarts = parser.add_mutually_exclusive_group()
    restarts.add_argument(
        "--max-restarts",
        type=whole(least=0),
        default=0,
        metavar="N",
        help="start all ranks again up to N times after one died, hung or diverged, from the newest checkpoint under "
        "--save (default 0)",
    )
    restarts.add_argument(
        "--restart",
        dest="max_restarts",
        action="store_const",
        const=_DEFAULT_RESTARTS,
        help=f"--max-restarts {_DEFAULT_RESTARTS}",
    )
    return parser


def _placement(own: argparse.Namespace) -> NodeRanks:
    """The placement of ranks, from the command line.

    Raises:
        UserError: numbers contradict each other.
    """
    if own.cpu_ranks is not None:
        check_cpu_ranks(own.cpu_ranks, "--cpu-ranks")
    if own.node_rank >= own.nnodes:
        raise UserError(
            f"--node-rank {own.node_rank} is none of --nnodes {own.nnodes}; number the nodes from 0 to --nnodes - 1"
        )
    if own.nnodes > 1 and own.master_addr is None:
        raise UserError(f"--nnodes {own.nnodes} needs --master-addr; give the name or address of node 0")
    if own.nnodes == 1 and (own.master_addr is not None or own.master_port is not None):
        raise UserError("--master-addr and --master-port have no effect with one node; drop them or give --nnodes")
    on_cpu = own.cpu_ranks is not None or own.gpus == 0
    return NodeRanks(
        ranks_per_node=own.cpu_ranks or own.gpus or 1,
        on_cpu=on_cpu,
        num_nodes=own.nnodes,
        node_rank=own.node_rank,
        master_addr=own.master_addr,
        master_port=29500 if own.master_port is None else own.master_port,
        max_restarts=own.max_restarts,
        launch=slurm_launch() if own.nnodes > 1 else None,
    )


if __name__ == "__main__":
    sys.exit(main())
