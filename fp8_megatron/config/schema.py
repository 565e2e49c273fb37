"""The configuration: frozen dataclasses that define the YAML keys, the command-line flags and their help.

Each field is a flag with Megatron's name (``num_layers`` ↔ ``--num-layers``) and a YAML key under its section
(``model: {num_layers: 24}``). Its type states its limits (`fields`). The string below it is its help text. Sections of
their own files are imported here. `io` reads and writes configurations. `checks` reports configurations that cannot
work before any device is touched. Functions take only the section that they need.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ..storage import FP8_GEMM_MULTIPLE
from .batch_schedule import BatchSchedule
from .fields import (
    BatchSize,
    Count,
    CountOrZero,
    LayersOrZero,
    NotNegative,
    Processes,
    Samples,
    Threads,
)
from .fim import FimConfig
from .model import ModelConfig
from .optimizer import OptimizerConfig
from .parallel import ParallelConfig
from .pipeline_layout import PipelineLayout, pipeline_layout
from .precision import PrecisionConfig
from .run_outputs import CheckpointConfig, LoggingConfig, ProfileConfig
from .words import shortened, whole_number

#: Megatron's names. The three kinds of SentencePiece are one.
TokenizerType = Literal[
    "GPT2BPETokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "HuggingFaceTokenizer",
    "TikTokenizer",
    "NullTokenizer",
]

#: Steps of a run that has neither --train-iters nor --train-samples.
DEFAULT_TRAIN_ITERS = 1000
#: The first step of a run has no delayed scales. The second step runs the kernels that all later steps run.
MIN_CUDA_GRAPH_WARMUP_STEPS = 2


@dataclass(frozen=True)
class DataConfig(FimConfig):
    """The source of tokens."""

    data_path: tuple[str, ...] = ()
    """Prefixes of .bin/.idx pairs, or weight prefix weight prefix … for a blend. --split divides them into train,
    validation and test data."""
    train_data_path: tuple[str, ...] = ()
    """Like --data-path, for training only. Give --valid-data-path too, and no --split."""
    valid_data_path: tuple[str, ...] = ()
    """Like --data-path, for validation only."""
    test_data_path: tuple[str, ...] = ()
    """Like --data-path, for the test at the end."""
    data_args_path: str | None = None
    """File with the words of --data-path. Replaces --data-path. It is read once, at the start."""
    per_split_data_args_path: str | None = None
    """JSON file {"train": [weight, prefix, …], "valid": …, "test": …}: --train-data-path and the others."""
    split: str = "969,30,1"
    """Relative sizes of the train, validation and test parts of --data-path. The test part is evaluated at the end."""
    mock_data: bool = False
    """Train on random tokens (benchmarks), of --vocab-size or of a tokenizer's vocabulary."""
    tokenizer_type: TokenizerType | None = None
    """Kind of tokenizer. NullTokenizer takes the vocabulary from --vocab-size. Default: GPT2BPETokenizer with
    --vocab-file or --merge-file, else SentencePieceTokenizer."""
    tokenizer_model: str | None = None
    """The SentencePiece .model file, tiktoken's .json vocabulary, a local Hugging Face tokenizer folder, or its name on
    the hub."""
    vocab_file: str | None = None
    """GPT2BPETokenizer: gpt2-vocab.json."""
    merge_file: str | None = None
    """GPT2BPETokenizer: gpt2-merges.txt."""
    tiktoken_pattern: Literal["v1", "v2"] = "v2"
    """TikTokenizer: how text is split into words. v2 starts a new word before a capital letter."""
    tiktoken_num_special_tokens: Count = 1000
    """TikTokenizer: ids of special tokens, before those of the file."""
    tokenizer_special_tokens: tuple[str, ...] = ()
    """Tokens that are never split (GPT2BPETokenizer, HuggingFaceTokenizer, TikTokenizer)."""
    tokenizer_hf_no_include_special_tokens: bool = False
    """HuggingFaceTokenizer: add no tokens around a text, such as a Llama's BOS."""
    null_tokenizer_eod_id: CountOrZero | None = None
    """NullTokenizer: the token that ends a document. Default: the last."""
    data_cache_path: str | None = None
    """Folder for caches of dataset indices. If it holds all of them, it is only read. Default: cache/ beside the
    data."""
    num_dataset_builder_threads: Threads = 1
    """Threads that build the indices of a blend's datasets."""
    mmap_bin_files: bool = True
    """On: map the .bin files into memory. Off: read them, for file systems where mapping is slow or impossible."""
    dataloader_type: Literal["single", "cyclic"] = "single"
    """single: the shuffled order of the dataset. cyclic: every pass over the dataset is shuffled anew."""
    data_sharding: bool = True
    """With --dataloader-type cyclic. On: each data-parallel rank draws from its own part of the dataset."""
    num_workers: Processes = 2
    """Loader processes per rank; 0 loads in the training process."""
    reset_position_ids: bool = False
    """Restart position ids after each end-of-document."""
    reset_attention_mask: bool = False
    """Keep attention within a document."""
    eod_mask_loss: bool = False
    """Leave end-of-document tokens out of the loss."""
    sft: bool = False
    """Fine-tune on conversations. The data paths are JSON lines of messages. The loss is computed on answers only."""
    sft_tokenizer_prompt_format: Literal["default", "identity", "nemotron-h-aligned", "nemotron-nano-v2"] = "default"
    """How --sft writes a conversation. default: the tokenizer's own chat template. identity: only the
    messages."""
    sft_chat_template: str | None = None
    """File with a Jinja chat template for --sft. Replaces --sft-tokenizer-prompt-format."""
    sft_packing: bool = True
    """On: --sft fills a sample with conversations of several lines. Off: a sample is one line, as in Megatron."""

    @property
    def keeps_documents_apart(self) -> bool:
        """Whether attention stays within the documents of a sample."""
        return self.reset_attention_mask or self.sft

    @property
    def has_no_tokenizer(self) -> bool:
        """Whether tokens are random numbers below --vocab-size, without a tokenizer's files."""
        return self.mock_data and self.tokenizer_model is None and self.vocab_file is None

    @property
    def tokenizer_kind(self) -> TokenizerType:
        """The kind of tokenizer, with the default filled in."""
        if self.tokenizer_type is not None:
            return self.tokenizer_type
        return "GPT2BPETokenizer" if self.vocab_file or self.merge_file else "SentencePieceTokenizer"


@dataclass(frozen=True)
class TrainingConfig:
    """The training loop."""

    micro_batch_size: BatchSize = 4
    """Sequences in one forward pass of one rank."""
    global_batch_size: BatchSize | None = None
    """Sequences in one step over all ranks. Default: micro-batch-size × data-parallel size."""
    rampup_batch_size: tuple[str, ...] = ()
    """START INCREMENT SAMPLES: the global batch grows from START to --global-batch-size by INCREMENT over SAMPLES."""
    step_batch_size_schedule: tuple[str, ...] = ()
    """TOKENS:BATCH …: the global batch is BATCH from TOKENS tokens on (0:16 2.4B:320). Replaces --global-batch-size."""
    calculate_per_token_loss: bool = False
    """On: the loss is the mean over all unmasked tokens of the global batch. Off: the mean of the micro-batches' means.
    They differ if micro-batches mask different numbers of tokens."""
    train_iters: Count | None = None
    """Number of optimizer steps. Give this or --train-samples."""
    train_samples: Samples | None = None
    """Number of training samples. The learning-rate schedule then counts samples, too: --lr-decay-samples …"""
    iterations_to_skip: tuple[str, ...] = ()
    """Iterations, counted from 1, whose data is skipped. They train nothing and do not move the schedule."""
    eval_interval: CountOrZero = 0
    """Steps between validations. One more validation and the test follow at the end. 0: no validation, no test."""
    eval_iters: CountOrZero = 100
    """Global batches in one validation. The next one reads the batches behind them, as in Megatron."""
    eval_global_batch_size: BatchSize | None = None
    """Sequences in one batch of a validation, over all ranks. Default: those of a step."""
    eval_fixed_samples: bool = False
    """On: every validation reads the same batches, the first ones."""
    full_validation: bool = False
    """On: every validation reads each token of the validation split once, instead of --eval-iters batches."""
    multiple_validation_sets: bool = False
    """With --full-validation: report a loss for each file of --valid-data-path."""
    validation_set_names: tuple[str, ...] = ()
    """Names of the validation sets, in the order of --valid-data-path. Default: 0, 1, …"""
    skip_train: bool = False
    """Evaluate the checkpoint of --load on the validation and test data, and end. Nothing is trained or saved."""
    seed: CountOrZero = 1234
    """Seed of initialisation, data order and dropout. The initial weights do not depend on the parallel layout."""
    exit_interval: CountOrZero | None = None
    """Save and stop at the next iteration that is a multiple of this. 0: do not."""
    exit_duration_in_mins: NotNegative | None = None
    """Save and stop after this many minutes, counted from before data and model are built and loaded. 0: do not."""
    max_skipped_steps: Count = 20
    """Stop after this many consecutive steps skipped for a non-finite loss or gradient."""
    loss_spike_threshold: NotNegative = 10.0
    """A step is a loss spike if its loss is this many robust standard deviations above the median of the last 64 steps.
    0: no step is."""
    rollback_on_loss_spike: bool = False
    """On: a spike ends the ranks. With --max-restarts they load the last checkpoint and skip the data of the spike."""
    check_weight_hash_across_dp_replicas_interval: Count | None = None
    """Steps between comparisons of tensors that are equal on several ranks: weights, scales, norms, step count, amax
    histories. A difference ends the run with an error that names the ranks. Each checkpoint is compared before it is
    saved."""
    deterministic_mode: bool = False
    """Use only kernels whose results are bitwise reproducible."""
    cuda_graph_impl: Literal["auto", "none", "local"] = "auto"
    """local: record forward and backward of a step once as a CUDA graph and replay it in every step, so that kernels do
    not wait for the host. none: do not record. auto: record on the GPUs of one node if the configuration can be
    recorded, memory suffices, and layers are small enough to become faster."""
    cuda_graph_scope: Literal["full_iteration"] = "full_iteration"
    """Contents of a graph: all micro-batches of a step and the reduction of their gradients."""
    cuda_graph_warmup_steps: CountOrZero = 3
    """Steps before the graph is recorded."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute activations in backward: whole layers (full) or the parts of --recompute-modules (selective)."""
    recompute_modules: tuple[str, ...] = ()
    """Parts of a layer that selective recomputation covers, by default core_attn. core_attn: softmax(QKᵀ)·V. mlp: in
    FP8 layers the GEMM before the activation function, which has the largest output of a layer; otherwise the whole
    MLP. moe: likewise of the experts, and the shared expert; not the router. moe_act: activations of experts.
    shared_experts: the shared expert. layernorm: norms under --precision te. FP8 layers always recompute norms and
    activations of experts."""
    recompute_method: Literal["uniform", "block"] | None = None
    """Which layers full recomputation covers; see --recompute-num-layers."""
    recompute_num_layers: LayersOrZero | None = None
    """Layers per recomputed chunk (uniform) or recomputed layers per (virtual) stage (block; 0: none)."""
    cpu_offloading_num_layers: LayersOrZero = 0
    """This many first layers of each (virtual) stage keep their activations for backward on the host. Copies run during
    the computation of other layers. With full recomputation only the layers' inputs are kept."""
    loss_chunk_size: Count | None = None
    """Positions of each sequence whose logits are computed at a time. Backward recomputes them. Default: all."""
    mlp_chunks_for_training: Count = 1
    """Number of chunks of a sequence that an MLP processes one after another. Needs recomputed MLPs. As in Megatron,
    this holds for all layers, also those that --recompute-method block does not recompute."""

    @property
    def validates(self) -> bool:
        """Whether held-out data is read."""
        return self.eval_interval > 0 or self.skip_train

    @property
    def reads_validation_data(self) -> bool:
        """Whether a validation has batches."""
        return self.validates and (self.eval_iters > 0 or self.full_validation)

    @property
    def moves_on(self) -> bool:
        """Whether each validation reads the batches behind those of the one before."""
        return not (self.eval_fixed_samples or self.full_validation or self.skip_train)

    @property
    def left_out(self) -> frozenset[int]:
        """The iterations to skip, which have been checked."""
        return frozenset(map(int, self.iterations_to_skip))

    @property
    def recomputed_modules(self) -> tuple[str, ...]:
        """What selective recomputation covers, with the default filled in; empty without it."""
        return (self.recompute_modules or ("core_attn",)) if self.recompute_granularity == "selective" else ()


@dataclass(frozen=True)
class Config:
    """The whole configuration of a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting by name; names are unique over sections."""
        return {name: value for section in vars(self).values() for name, value in vars(section).items()}

    def is_fp8_layer(self, layer: int) -> bool:
        """Whether layer `layer`, counted over the whole model, has this project's FP8 linear layers."""
        precision = self.precision
        if not precision.is_fp8 or not precision.first_last_layers_bf16:
            return precision.is_fp8
        last = self.model.num_layers - precision.num_layers_at_end_in_bf16
        return precision.num_layers_at_start_in_bf16 <= layer < last

    @property
    def has_fp8_lm_head(self) -> bool:
        """Whether the LM head's GEMMs are in FP8: as asked for, or where that is sure to be possible."""
        precision = self.precision
        if precision.fp8_lm_head is not None:
            return precision.fp8_lm_head
        is_wanted = precision.is_fp8 and precision.fp8_recipe == "delayed" and not precision.first_last_layers_bf16
        return is_wanted and self.head_rows % FP8_GEMM_MULTIPLE == 0

    @property
    def fp8_summary(self) -> str:
        """What --precision fp8 does in this run, also where flags leave it open."""
        precision = self.precision
        head = "in FP8" if self.has_fp8_lm_head else "in 16 bits"
        return (
            f"{precision.level}, {precision.fp8_recipe} scales, {precision.weight_grad_scaling} scales of weight "
            f"gradients, LM head {head}"
        )

    @property
    def head_rows(self) -> int:
        """A number that divides the rows of the LM head on each tensor-parallel rank, for any tokenizer if it sets the
        vocabulary.
        """
        divisor, size = self.model.make_vocab_size_divisible_by, self.model.vocab_size
        return divisor if size is None else -(-size // (divisor * self.parallel.tensor_model_parallel_size)) * divisor

    @property
    def pipeline_layout(self) -> PipelineLayout:
        """The layers of every pipeline stage."""
        return pipeline_layout(self.parallel, self.model.num_layers)

    def layers_of_stage(self, stage: int) -> list[int]:
        """Layers of pipeline stage `stage`, counted over the whole model; includes all its virtual stages."""
        return self.pipeline_layout.layers_of(stage)

    def data_parallel_size(self, world_size: int) -> int:
        """Ranks that read different samples: world_size / (tensor × context × pipeline)."""
        return world_size // self.parallel.ranks_per_sample

    def num_replicas(self, world_size: int, *, has_matrices: bool = False) -> int:
        """Ranks that hold the same weights: context × data parallel.

        Args:
            has_matrices: of weights [M, N, K], such as experts, whose matrices ranks may share.
        """
        if has_matrices:
            return world_size // (self.parallel.matrix_holders * self.parallel.pipeline_model_parallel_size)
        return self.data_parallel_size(world_size) * self.parallel.context_parallel_size

    @property
    def tokens_per_micro_batch(self) -> int:
        """Tokens of a micro-batch that one rank has, or its tensor-parallel ranks together."""
        return self.training.micro_batch_size * self.model.seq_length // self.parallel.context_parallel_size

    def batch_schedule(self, world_size: int) -> BatchSchedule:
        """Samples of each step over all ranks, with the default filled in.

        Raises:
            ValueError: it cannot be read, in one line with names and values.
        """
        training = self.training
        ramp, steps = training.rampup_batch_size, training.step_batch_size_schedule
        if ramp and steps:
            raise ValueError(
                f"rampup_batch_size({' '.join(ramp)}) and step_batch_size_schedule({' '.join(steps)}) both set the "
                f"global batch; drop one"
            )
        given = training.global_batch_size
        if given is None:
            given = training.micro_batch_size * self.data_parallel_size(world_size)
        try:
            if steps:
                return BatchSchedule.steps(steps, self.model.seq_length)
            if ramp:
                if len(ramp) != 3:
                    raise ValueError("give three whole numbers above 0: start, increment, samples")
                start, increment, samples = map(whole_number, ramp)
                return BatchSchedule.ramp(start, increment, samples, given)
        except ValueError as error:
            name = "step_batch_size_schedule" if steps else "rampup_batch_size"
            raise ValueError(f"{name}({shortened(' '.join(steps or ramp))}) cannot be followed: {error}") from None
        return BatchSchedule.constant(given)

    def global_batch_size(self, world_size: int) -> int:
        """Samples per step over all ranks; of a batch that grows, the largest."""
        return self.batch_schedule(world_size).largest

    def eval_global_batch_size(self, world_size: int) -> int:
        """Samples of one batch of a validation over all ranks."""
        return self.training.eval_global_batch_size or self.global_batch_size(world_size)

    @property
    def counts_samples(self) -> bool:
        """Whether the run's length and schedules are given in samples, not in steps."""
        return self.training.train_samples is not None

    @property
    def train_counts(self) -> int:
        """The run's length: samples if `counts_samples`, else steps."""
        if self.training.train_samples is not None:
            return self.training.train_samples
        return DEFAULT_TRAIN_ITERS if self.training.train_iters is None else self.training.train_iters

    def samples_per_count(self, world_size: int) -> int:
        """Samples that the schedules count for one of `train_counts`."""
        return 1 if self.counts_samples else self.global_batch_size(world_size)

    def train_iters(self, world_size: int, *, iteration: int = 0, consumed_samples: int = 0) -> int:
        """Optimizer steps of the whole training.

        Args:
            iteration, consumed_samples: where the run stands. Training on a number of samples ends when they are
                consumed, whatever batches the steps before had.
        """
        if not self.counts_samples:
            return self.train_counts
        return iteration + self.batch_schedule(world_size).num_steps(self.train_counts, consumed_samples)

    def num_micro_batches(self, world_size: int) -> int:
        """Micro-batches per rank per step; of a batch that grows, the most."""
        samples_per_pass = self.training.micro_batch_size * self.data_parallel_size(world_size)
        return self.global_batch_size(world_size) // samples_per_pass
