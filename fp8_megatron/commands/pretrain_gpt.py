"""Train on this rank: the program that torchrun starts on each rank (`fp8-megatron train` starts torchrun)."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial

from ..config.checks import check_config
from ..config.folder_checks import check_run_folders
from ..data.token_files import check_input_files
from ..device.processes import launch_id
from .child_runs import follow_parent
from .dry_run import dry_run
from .environment import check_launcher, check_no_fp4, launched_ranks, take_mpi_ranks
from .error_log import logging_errors_in
from .process_limits import check_process_limits
from .program import LogOnStdout, exit_status, leave, prepare_megatron, show, tell
from .run_settings import run_command_line

_DIVERGED_STATUS = 1


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


if __name__ == "__main__":
    sys.exit(main())
