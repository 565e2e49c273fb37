"""Pre-train a GPT: ``torchrun --nproc-per-node N pretrain_gpt.py --config FILE [--flags]``; ``--help`` lists them."""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings

from fp8_megatron.config.checks import ConfigError
from fp8_megatron.config.io import parse_config


def main() -> int:
    """Train; returns the exit status."""
    rank = int(os.environ.get("RANK", "0"))
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(message)s", stream=sys.stdout)
    logging.getLogger("megatron").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
    try:
        config = parse_config()
        from fp8_megatron.checkpoint.files import CheckpointError
        from fp8_megatron.device.device import UnsupportedDeviceError
        from fp8_megatron.training.stopping import TrainingDiverged
        from fp8_megatron.training.trainer import Trainer
        from fp8_megatron.watch.failures import EXIT_STATUS, RankFailure
    except ConfigError as error:
        return fail(rank, error)
    try:
        Trainer(config).fit()
    except (ConfigError, CheckpointError, UnsupportedDeviceError, TrainingDiverged) as error:
        return fail(rank, error)
    except RankFailure as error:
        print(f"error on rank {rank}: {error}", file=sys.stderr, flush=True)
        return EXIT_STATUS
    return 0


def fail(rank: int, error: Exception) -> int:
    """Say what is wrong, once: ranks share most errors, and torchrun ends the others when the first one exits."""
    if rank != 0:
        time.sleep(5.0)
    print(f"error: {error}" if rank == 0 else f"error on rank {rank}: {error}", file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
