"""The sections of the configuration about what a run writes: checkpoints, logs, profiles.

`schema` says how fields become flags.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .fields import Count, CountOrZero, Size


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and resuming."""

    save: str | None = None
    """Folder to save checkpoints into."""
    load: str | None = None
    """Folder to resume from, at its latest checkpoint, or one of its folders iter_*. A folder without a checkpoint
    is an error. Exception: if --load equals --save, the run starts from scratch with a warning."""
    exit_on_missing_checkpoint: bool = False
    """A folder --load without a checkpoint is an error even if it equals --save."""
    allow_foreign_checkpoints: bool = False
    """Save into a folder with checkpoints of another run. Each of them stays until this run saves the same
    iteration."""
    save_interval: Count | None = None
    """Steps between checkpoints. With --save, the end of training and SIGTERM always save a checkpoint."""
    keep_last: Count | None = None
    """Keep only this many of the newest checkpoints. Default: all; 1 with --save-retain-interval."""
    save_retain_interval: Count | None = None
    """Keep checkpoints whose iteration is a multiple of this, in addition to --keep-last."""
    async_save: bool = False
    """Copy the state and write it in the background while training continues."""
    ckpt_format: Literal["torch_dist"] = "torch_dist"
    """Format of checkpoints: megatron-core's, which any parallel layout can read."""
    ckpt_state_dtype: Literal["native", "fp32"] = "native"
    """native: masters and moments in the storage dtypes of training. fp32: for megatron-core's own readers."""
    ckpt_step: Count | None = None
    """Load the checkpoint of this iteration. Default: the latest complete one."""
    finetune: bool = False
    """Load only the weights from --load: no optimizer, schedule, data position or random state."""
    load_optim: bool = True
    """On: load moments and step count from --load. Off: start them at zero, at the same data position."""
    load_rng: bool = True
    """On: load the states of random generators from --load."""
    save_optim: bool = True
    """On: save moments and step count. Off: save only weights; loading them needs --no-load-optim or
    --finetune."""
    save_rng: bool = True
    """On: save the states of random generators."""
    pretrained_checkpoint: str | None = None
    """Folder to load the first weights from, as --finetune does, if --load holds no checkpoint of this run yet."""
    moe_use_upcycling: bool = False
    """Make the experts of a layer of the MLP of a model without experts. Its checkpoint is that of
    --pretrained-checkpoint, or of --load, of which the weights are loaded alone."""
    moe_upcycling_granularity: Size = 1
    """Experts that one such MLP is cut into."""
    use_checkpoint_args: bool = False
    """Take model settings and tokenizer from the checkpoint of --load. Flags and --config files override them."""
    use_tokenizer_model_from_checkpoint_args: bool = True
    """On: --use-checkpoint-args also takes the tokenizer."""
    non_persistent_save_interval: Count | None = None
    """Steps between extra checkpoints. Only the newest of these is kept. All checkpoints of --save-interval stay."""
    non_persistent_ckpt_type: Literal["global"] | None = None
    """Where the checkpoints of --non-persistent-save-interval are. global: in --save."""

    @property
    def loads_what_it_saves(self) -> bool:
        """Whether --load and --save name one folder, so that a run without a checkpoint starts from scratch."""
        return None not in (self.load, self.save) and Path(self.load or "").resolve() == Path(self.save or "").resolve()

    @property
    def weights_alone_flag(self) -> str | None:
        """The flag under which --load gives the first weights and nothing else; None: a run goes on from it."""
        if self.finetune:
            return "--finetune"
        return "--moe-use-upcycling" if self.moe_use_upcycling and self.pretrained_checkpoint is None else None

    @property
    def loads_weights_alone(self) -> bool:
        """Whether --load gives the first weights and nothing else."""
        return self.weights_alone_flag is not None

    @property
    def upcycles(self) -> int | None:
        """The granularity of upcycling; None without it."""
        return self.moe_upcycling_granularity if self.moe_use_upcycling else None

    def saves_at(self, iteration: int) -> bool:
        """Whether an interval ends with this step."""
        intervals = (self.save_interval, self.non_persistent_save_interval)
        return any(interval is not None and iteration % interval == 0 for interval in intervals)

    @property
    def saves_by_interval(self) -> bool:
        """Whether checkpoints are saved before the end."""
        return self.save_interval is not None or self.non_persistent_save_interval is not None

    @property
    def num_newest_kept(self) -> int | None:
        """How many of the newest checkpoints are kept; None: all, if no interval is retained."""
        return 1 if self.non_persistent_save_interval is not None else self.keep_last

    @property
    def retained_interval(self) -> int | None:
        """Checkpoints whose iteration is a multiple of this are kept for good."""
        return self.save_interval if self.non_persistent_save_interval is not None else self.save_retain_interval


@dataclass(frozen=True)
class LoggingConfig:
    """Console output, metrics and log files."""

    output_dir: str | None = None
    """Folder for config.yaml, metrics.jsonl, loss.png and tensorboard/. Default: --save, else runs/<time>."""
    log_interval: Count = 100
    """Steps between two lines on the console. metrics.jsonl has every step."""
    fp8_health_interval: CountOrZero = 100
    """Steps between measurements of the error of every FP8 cast (health.jsonl). 0: none."""
    log_params_norm: bool = False
    """Report the norm of all master weights of every step (one more pass over them)."""
    log_num_zeros_in_grad: bool = False
    """Report how many elements of every step's averaged gradients are 0 (one more pass over them)."""
    moe_per_layer_logging: bool = False
    """Report the load of experts, and the losses that balance it, for each layer, too."""
    save_tokens_per_expert_interval: Count | None = None
    """Steps between lines of tokens_per_expert.jsonl, which has the tokens of every expert. Default: none."""
    tensorboard: bool = True
    """On: write TensorBoard events."""
    tensorboard_dir: str | None = None
    """Folder of TensorBoard's events. Default: output-dir/tensorboard."""
    wandb_project: str | None = None
    """Log to this W&B project (WANDB_MODE=offline works)."""
    wandb_exp_name: str | None = None
    """Name of the W&B run."""
    wandb_entity: str | None = None
    """User or team that owns the W&B project. Default: the user of the login."""
    wandb_save_dir: str | None = None
    """Folder of W&B's files. Default: output-dir."""
    progress: Literal["auto", "on", "off"] = "auto"
    """Progress bar with ETA. auto: only on a terminal."""


@dataclass(frozen=True)
class ProfileConfig:
    """Profiles of where a step's time goes (torch.profiler)."""

    profile: bool = False
    """Profile some steps and write a table of their kernels to output-dir/profile_rank*.txt and .json."""
    profile_step_start: Count = 10
    """First profiled step."""
    profile_step_end: Count = 12
    """Step at which profiling ends. This step is not profiled."""
    profile_ranks: tuple[str, ...] = ("0",)
    """Global ranks that are profiled."""
    profile_trace: bool = False
    """Also record the host and write trace_rank*.json.gz for Perfetto (slower). Makes --cuda-graph-impl auto none."""

    def first_and_last(self, left_out: Container[int]) -> tuple[int, int] | None:
        """The first and the last profiled step of a run that leaves out the iterations `left_out`; None: no step."""
        steps = [step for step in range(self.profile_step_start, self.profile_step_end) if step not in left_out]
        return (steps[0], steps[-1]) if steps else None
