"""`Trainer`: what stands around a training run. Device, process groups, signals and logs are set up and closed here."""

from __future__ import annotations

import logging
import os
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import psutil
import torch

from ..config.checks import check_config
from ..config.folder_checks import named_output_dir
from ..config.schema import Config
from ..device import device as devices
from ..formats.recipes import roles_of
from ..kernels import ops
from ..mcore.attention import may_use_cudnn, preferring_backends
from ..mcore.runtime import runtime
from ..mcore.topology import initialized, needs_launch_order
from ..reporting.run_log import EVENTS_FILE, last_run, logging_events, read_events
from ..watch.failures import watched_world
from ..watch.restarts import Launch, begin_attempt
from .evaluation import evaluate_checkpoint
from .graph_choice import GraphChoice, choose_graph
from .run_start import Session, starting_run
from .stopping import SignalHandler
from .training_run import TrainingRun

logger = logging.getLogger(__name__)


class Trainer:
    """Trains the model that a configuration describes. Every rank creates one and calls `fit`.

    Raises:
        ConfigError: the configuration cannot work. No device or file has been touched.
    """

    def __init__(self, config: Config) -> None:
        check_config(config, devices.world_size())
        self.config = config
        self.output_dir = _output_dir(config)

    def fit(self) -> None:
        """Train until `train_iters`, a signal, a time limit or divergence ends the run; saves before it returns.

        With --skip-train, evaluate the checkpoint instead.
        """
        started = time.monotonic()
        device, graph_choice = self._prepare_device()
        model = self.config.model
        with_cudnn = may_use_cudnn(
            model.attention_backend, model.seq_length, recorded=graph_choice.records, device=device
        )
        if self.config.training.deterministic_mode:
            torch.use_deterministic_algorithms(True)
        with ExitStack() as stack:
            # Until training begins there is nothing to save, and a signal ends the process at once, wherever it waits.
            # Entered late, left last: the launcher may pass a signal on while the logs are closed.
            signals = SignalHandler()
            training = stack.enter_context(ExitStack())
            stack.enter_context(runtime(device))
            stack.enter_context(preferring_backends(model.attention_backend, with_cudnn=with_cudnn))
            parallel = self.config.parallel
            world = initialized(parallel, model.num_layers, device, records_graphs=graph_choice.records)
            timeout_seconds = 60.0 * parallel.distributed_timeout_minutes
            topology, watch = stack.enter_context(
                watched_world(world, self.output_dir, timeout_seconds=timeout_seconds)
            )
            start = stack.enter_context(starting_run(self.config.checkpoint, topology))
            if self.config.training.skip_train:
                assert start.source is not None, "the configuration's checks, and those of --load"
                training.enter_context(signals)
                with watch:
                    evaluate_checkpoint(self.config, start.source, topology, device, watch=watch, signals=signals)
                return
            events = read_events(self.output_dir / EVENTS_FILE) if topology.rank == 0 else []
            log = stack.enter_context(
                logging_events(
                    self.output_dir,
                    is_writer=topology.rank == 0,
                    run=start.identity.run,
                    launch=Launch.of_environment().name,
                )
            )
            if topology.rank == 0:
                checkpoint = self.config.checkpoint
                begin_attempt(
                    self.output_dir,
                    Launch.of_environment(),
                    saves=checkpoint.save is not None,
                    saves_by_interval=checkpoint.saves_by_interval,
                )
            session = Session(
                self.output_dir,
                topology,
                watch,
                device,
                signals,
                graph_choice,
                start,
                log,
                started=started,
                replaces_other_run=last_run(events) not in (None, start.identity.run),
            )
            run = TrainingRun(self.config, session)
            stack.callback(run.close)
            training.enter_context(signals)
            with watch:  # other ranks learn of an error before the logs are closed, which may take long
                run.train()

    def _prepare_device(self) -> tuple[torch.device, GraphChoice]:
        """Choose this rank's device, and whether steps are recorded; set the environment that both need.

        Raises:
            UnsupportedDeviceError: the device cannot do what the configuration asks for.
        """
        world_size = devices.world_size()
        choose = partial(choose_graph, self.config, world_size=world_size, node_size=devices.node_size())
        # has_gpu=True: a look for GPUs would start CUDA, and without a GPU the environment does not matter.
        records_graphs = choose(has_gpu=True).records
        in_order = needs_launch_order(
            self.config.parallel, has_fp8_layers=self.config.precision.is_fp8, records_graphs=records_graphs
        )
        warning = devices.prepare_cuda_environment(needs_launch_order=in_order, records_graphs=records_graphs)
        device = devices.select_device()
        if warning is not None and device.type == "cuda" and world_size > 1:
            logger.warning("%s", warning)
        if self.config.precision.is_fp8:
            devices.check_fp8_support(device)
            for name in self.config.precision.recipes:
                roles_of(name, False).input.check_device(device)
            if self.config.precision.fp8_dot_product_attention:
                ops.check_fp8_attention(device)
        graph_choice = choose(has_gpu=device.type == "cuda")
        if graph_choice.records:
            devices.check_cuda_graph_support(device)
        return device, graph_choice


def _output_dir(config: Config) -> Path:
    return named_output_dir(config) or Path("runs") / time.strftime("%Y%m%d-%H%M%S", time.localtime(_started()))


def _started() -> float:
    """Start of the run in seconds since the epoch; equal on all ranks of a node, which torchrun has started."""
    return psutil.Process(os.getppid()).create_time() if devices.node_size() > 1 else time.time()
