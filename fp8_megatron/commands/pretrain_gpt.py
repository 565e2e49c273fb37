"""Train on this rank: the program that torchrun starts on each rank (`fp8-megatron train` starts torchrun).

The limits that the shell sets for this process (`ulimit`) are checked before the work.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
from collections.abc import Sequence
from functools import partial

from ..config.checks import check_config
from ..config.folder_checks import check_run_folders
from ..data.token_files import check_input_files
from ..device.processes import launch_id
from ..errors import UserError
from .dry_run import dry_run
from .environment import check_launcher, check_no_fp4, follow_parent, launched_ranks, take_mpi_ranks
from .error_report import logging_errors_in
from .program import LogOnStdout, exit_status, leave, prepare_megatron, show, tell
from .run_settings import run_command_line

_DIVERGED_STATUS = 1
#: A rank opens its token files, checkpoints' files and one connection for each peer.
_FEWEST_FILES = 256
#: A tiny model trains on a CPU in 2 GiB. With 1 GiB, the import of megatron-core stands still. CUDA needs far more.
_LEAST_ADDRESS_SPACE = 2 * 2**30


def main(words: Sequence[str] | None = None, prog: str = "pretrain_gpt.py") -> int:
    """Exit status: 0; 1 after a divergence or where replicas differ; `watch.failures.EXIT_STATUS` if another rank
    ended the run; otherwise as `program.exit_status` says."""
    follow_parent()
    take_mpi_ranks(os.environ)
    level = logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING
    logging.basicConfig(level=level, handlers=[LogOnStdout()])
    logging.getLogger("megatron").setLevel(logging.WARNING)
    return exit_status(partial(_train, words, prog))


def _train(words: Sequence[str] | None, prog: str) -> int:
    check_process_limits()
    check_no_fp4(os.environ)
    rank, world_size = launched_ranks(os.environ)
    command_line = run_command_line(words, prog)
    config = command_line.config
    if rank == 0:
        for line in command_line.notes:
            tell(f"note: {line}")
    if command_line.dry_run:
        if rank == 0:
            dry_run(command_line, world_size)
        return 0
    command_line.check_no_world_size()
    check_config(config, world_size)
    check_launcher(os.environ)
    check_run_folders(config)
    check_input_files(config)
    prepare_megatron()
    from ..training.loss_spikes import LossSpike
    from ..training.run_start import check_what_is_loaded
    from ..training.stopping import TrainingDiverged
    from ..training.trainer import Trainer
    from ..watch.failures import EXIT_STATUS, RankFailure
    from ..watch.replica_hash import ReplicasDiffer

    if rank == 0:  # alone: it lists folders and may have to finish what a killed run left in them
        check_what_is_loaded(config)
    try:
        trainer = Trainer(config)
        with logging_errors_in(trainer.output_dir):
            trainer.fit()
            if launch_id() is not None:
                # The launcher and the scheduler both pass SIGTERM on. One that comes late must not fail this rank.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
        leave(sys.stdout)  # the log is no reason for another status
    except (TrainingDiverged, LossSpike, ReplicasDiffer) as error:
        show(error)
        return _DIVERGED_STATUS
    except RankFailure as error:
        tell(f"error on rank {rank}: {error}")
        return EXIT_STATUS
    return 0


def check_process_limits() -> None:
    """Raise the number of open files as far as this process may, and check what is left of its limits.

    Raises:
        UserError: too few files, or too little address space, to import what training needs.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < _FEWEST_FILES:
        raise UserError(f"`ulimit -n` allows this process {hard} open files; raise it to {_FEWEST_FILES} or more")
    space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if space != resource.RLIM_INFINITY and space < _LEAST_ADDRESS_SPACE:
        raise UserError(
            f"`ulimit -v` allows this process {space / 2**30:.1f} GiB of address space; raise it to "
            f"{_LEAST_ADDRESS_SPACE // 2**30} GiB or more, or give `ulimit -v unlimited`"
        )


if __name__ == "__main__":
    sys.exit(main())
