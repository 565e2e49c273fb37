"""Settings that Megatron changes after it has read them, and Megatron's defaults."""

from __future__ import annotations

import dataclasses
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from fp8_megatron.config.checks import ConfigError, check_config
from fp8_megatron.config.io import load_config, parse_command_line, parse_config
from fp8_megatron.config.learning_rate import LearningRateSchedule
from fp8_megatron.config.megatron_flags import Kind, megatron_options
from fp8_megatron.config.megatron_settings import OTHER_DEFAULTS, three_weights
from fp8_megatron.config.schema import Config, ModelConfig
from fp8_megatron.config.words import decimal

CONFIGS = Path(__file__).parents[2] / "configs"
DEFAULTS: dict[str, Any] = {name: value for section in vars(Config()).values() for name, value in vars(section).items()}
NO_PRECISION = "precision is fp8 (O3), the default here"


def alike(ours: Any, theirs: str) -> bool:
    ours = ours.value if isinstance(ours, Enum) else ours
    if isinstance(ours, tuple):
        return " ".join(ours) == theirs
    if isinstance(ours, int | float):
        return decimal(theirs) == ours
    return str(ours) == theirs


def test_defaults_are_megatrons() -> None:
    """Every default that Megatron has, but for those that the documents name."""
    theirs = {
        name: option.default
        for name, option in megatron_options().items()
        if option.kind is Kind.DOES and name in DEFAULTS and option.default
    }
    others = {name for name, default in theirs.items() if not alike(DEFAULTS[name], default)}
    assert len(theirs) > 40 and others == set(OTHER_DEFAULTS) - {"tokenizer_type"}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_state_what_training_depends_on(path: Path) -> None:
    """A model's file does not change with the defaults: dropout, schedule and optimizer are GPT-3's and FP8-LM's."""
    if path.stem == "fast":
        pytest.skip("goes over a model's file")
    config = load_config(path)
    assert (config.model.attention_dropout, config.model.hidden_dropout) == (0.0, 0.0)
    assert (config.optimizer.adam_beta1, config.optimizer.adam_beta2, config.optimizer.weight_decay) == (0.9, 0.95, 0.1)
    assert config.optimizer.lr_decay_style == "cosine" and config.optimizer.decoupled_weight_decay
    assert config.training.eval_interval > 0 and config.training.eval_iters in (8, 10)
    assert config.training.eval_fixed_samples
    parse_command_line(["--config", str(path)]).check_stated()


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("**/*.yaml")), ids=lambda path: f"{path.parent.stem}/{path.stem}")
def test_a_shortened_recipe_is_valid(path: Path) -> None:
    """A first try of three steps does not fail on the length of a warm-up or of a decay."""
    if path.stem == "fast":
        pytest.skip("goes over a model's file")
    files = [str(path)] if path.parent == CONFIGS else [str(CONFIGS / path.name), str(path)]
    words = ["--config", *files, *"--mock-data --data-path none --vocab-size 50304".split()]
    length = "--train-samples 48" if parse_config(words).counts_samples else "--train-iters 3"
    config = parse_config([*words, *length.split()])
    parallel = config.parallel
    of_experts = (parallel.expert_tensor_parallel_size or 1) * parallel.expert_model_parallel_size
    world_size = max(parallel.tensor_model_parallel_size, of_experts) * parallel.pipeline_model_parallel_size
    check_config(config, world_size, on_this_machine=False)


def test_a_warm_up_longer_than_the_run_is_cut() -> None:
    config = parse_config(["--mock-data", "--vocab-size", "512", "--train-iters", "5", "--lr-warmup-iters", "2000"])
    check_config(config, 1)
    assert LearningRateSchedule.of(config, 1).warmup_samples == 4 * config.global_batch_size(1)


def test_what_megatron_has_no_default_for_must_be_given() -> None:
    with pytest.raises(ConfigError) as error:
        parse_command_line(["--mock-data", "--hidden-size", "64", "--lr", "1e-3"]).check_stated()
    assert str(error.value) == (
        "not given: --num-layers --num-attention-heads --seq-length --micro-batch-size --train-iters; "
        "give them, or a --config file such as configs/gpt_345m.yaml"
    )


@pytest.mark.parametrize(
    ("given", "settled"),
    [
        ("99,1,0", "99,1,0"),
        ("'99,1,0'", "99,1,0"),
        ("99,1", "99,1,0"),
        ("969, 30, 1", "969,30,1"),
        ("100", "100,0,0"),
        (".9,.1,0", ".9,.1,0"),
        ("98/2/0", "98,2,0"),
        ("9,-1,0", "9,-1,0"),
        ("1,2,3,4", "1,2,3,4"),
        ("a,b", "a,b"),
    ],
)
def test_forms_of_a_split(given: str, settled: str) -> None:
    assert three_weights(given) == settled
    assert parse_config(["--split", given]).data.split == settled


def test_sequence_parallelism_is_off_on_one_rank(tmp_path: Path) -> None:
    line = parse_command_line(["--sequence-parallel", "--bf16"])
    assert not line.config.parallel.sequence_parallel
    assert line.notes == ("sequence_parallel is off: tensor_model_parallel_size is 1, and there is nothing to shard",)
    assert parse_config(["--sequence-parallel", "--tensor-model-parallel-size", "2"]).parallel.sequence_parallel


def test_a_run_of_15_trillion_tokens() -> None:
    """More samples than 31 bits count, and a bucket for all gradients, as in Swiss AI's script of Apertus-70B."""
    line = parse_command_line(
        "--bf16 --mock-data --vocab-size 512 --train-samples 3662109375 --lr-decay-samples 3662109374 "
        "--lr-warmup-samples 15360000 --lr-decay-style WSD --lr-wsd-decay-samples 3000000000 --global-batch-size 4096 "
        "--ddp-bucket-size 10000000000".split()
    )
    check_config(line.config, 1, on_this_machine=False)
    assert line.config.train_iters(1) == 3662109375 // 4096
    assert LearningRateSchedule.of(line.config, 1).wsd_decay_samples == 3_000_000_000
    assert line.notes == ("ddp_bucket_size(10000000000) is 2147483647 here, the largest bucket",)


def test_an_interval_that_no_run_reaches_is_never() -> None:
    words = "--bf16 --mock-data --vocab-size 512 --save a --save-interval 100000000000 --eval-interval 100000000000"
    line = parse_command_line([*words.split(), "--log-interval", "9999999999", "--exit-interval", "9999999999"])
    check_config(line.config, 1, on_this_machine=False)
    assert line.notes == () and line.config.training.eval_interval == line.config.checkpoint.save_interval == 2**31 - 1


def test_a_block_of_no_layers_recomputes_nothing() -> None:
    """--recompute-granularity full --recompute-method block --recompute-num-layers 0 is how scripts turn it off."""
    full = "--bf16 --mock-data --vocab-size 512 --recompute-granularity full --recompute-num-layers 0".split()
    line = parse_command_line([*full, "--recompute-method", "block"])
    assert line.notes == ("recompute_num_layers(0) with recompute_method(block): no layer is recomputed",)
    assert line.config.training.recompute_granularity is None
    check_config(line.config, 1)
    with pytest.raises(ConfigError, match=r"recompute_method\(uniform\) with recompute_num_layers\(0\) recomputes"):
        check_config(parse_config([*full, "--recompute-method", "uniform", "--cpu-offloading-num-layers", "2"]), 1)


@pytest.mark.parametrize(
    ("flags", "layers"),
    [
        ("", 0),
        ("--keep-fp8-transpose-cache", 24),
        ("--keep-fp8-transpose-cache --pipeline-model-parallel-size 4", 6),
        ("--keep-fp8-transpose-cache 5", 5),
        ("--keep-fp8-transpose-cache=5", 5),
        ("--keep-fp8-transpose-cache 30 --num-layers 8", 8),
    ],
)
def test_the_transpose_cache_is_a_switch_or_a_number(flags: str, layers: int) -> None:
    assert parse_config(flags.split()).precision.keep_fp8_transpose_cache == layers


@pytest.mark.parametrize(
    ("flags", "recipe"),
    [
        ("--fp8-format hybrid", ("delayed", 1, "most_recent")),
        ("--fp8-hybrid --msamp", ("delayed", 1, "most_recent")),
        ("--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max", ("delayed", 1024, "max")),
        ("--fp8-format hybrid --fp8-recipe tensorwise", ("tensorwise", 16, "max")),
        ("--fp8-recipe delayed", ("delayed", 16, "max")),
        ("--msamp", ("delayed", 16, "max")),
        (f"--config {CONFIGS / 'gpt_7b.yaml'} --fp8-format hybrid", ("delayed", 16, "max")),
        (f"--config {CONFIGS / 'gpt_7b.yaml'} {CONFIGS / 'fast.yaml'} --fp8-hybrid", ("delayed", 16, "max")),
    ],
)
def test_megatrons_switches_bring_its_recipe(flags: str, recipe: tuple[str, int, str]) -> None:
    precision = parse_config(flags.split()).precision
    assert (precision.fp8_recipe, precision.fp8_amax_history_len, precision.fp8_amax_compute_algo) == recipe


def test_a_precision_that_nobody_chose_is_said(tmp_path: Path) -> None:
    (note,) = parse_command_line([]).notes
    assert note.startswith(NO_PRECISION)
    for flags in (["--bf16"], ["--precision", "fp8"], ["--config", str(CONFIGS / "gpt_7b.yaml")]):
        assert parse_command_line(flags).notes == ()


def test_settings_of_token_files_have_nothing_to_do_with_random_tokens() -> None:
    flags = ["--split", "9,1", "--data-cache-path", "a", "--bf16"]
    assert parse_command_line([*flags, "--mock-data"]).notes == (
        "no effect here: --split --data-cache-path (docs/from-megatron.md says why)",
    )
    assert parse_command_line(flags).notes == ()


def test_flags_that_nothing_reads_and_that_change_nothing_are_said() -> None:
    """Megatron takes them, so its scripts go on. What a file says is not repeated."""
    says = "no effect here: {} (docs/from-megatron.md says why)".format
    assert parse_command_line(["--bf16", "--cuda-graph-impl", "none", "--cuda-graph-warmup-steps", "5"]).notes == (
        says("--cuda-graph-warmup-steps"),
    )
    assert parse_command_line(["--bf16", "--cuda-graph-warmup-steps", "5"]).notes == ()
    assert parse_command_line(["--bf16", "--eval-iters", "5"]).notes == (says("--eval-iters"),)
    assert parse_command_line(["--bf16", "--eval-iters", "5", "--eval-interval", "9"]).notes == ()
    growing = "--bf16 --start-weight-decay 0.1 --end-weight-decay 0.2 --weight-decay-incr-style cosine".split()
    assert parse_command_line([*growing, "--weight-decay", "0.3"]).notes == (says("--weight-decay"),)
    assert parse_command_line(["--bf16", "--weight-decay", "0.3"]).notes == ()
    resets = ["--bf16", "--reset-position-ids", "--reset-attention-mask"]
    for kind, notes in (("rope", (says("--reset-position-ids"),)), ("learned_absolute", ())):
        assert parse_command_line([*resets, "--position-embedding-type", kind]).notes == notes
    words = "--bf16 --mock-data --no-mmap-bin-files --tokenizer-type NullTokenizer --null-tokenizer-eod-id 3".split()
    assert parse_command_line(words).notes == (says("--no-mmap-bin-files --null-tokenizer-eod-id"),)
    assert parse_command_line(["--config", str(CONFIGS / "gpt_7b.yaml"), "--eval-interval", "0"]).notes == ()


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ("--no-load-optim", "load_optim(False) has no effect without load; drop it or give --load"),
        ("--no-load-rng", "load_rng(False) has no effect without load"),
        ("--override-opt_param-scheduler", "override_opt_param_scheduler(True) has no effect without load"),
        ("--initial-loss-scale 4096", "initial_loss_scale(4096.0) has no effect under precision(bf16); drop it or"),
        ("--lr-warmup-init 1e-05", "lr_warmup_init(1e-05) has no effect without a warm-up"),
        ("--hysteresis 1", "hysteresis(1) has no effect under precision(bf16)"),
        ("--wandb-exp-name a", "wandb_exp_name(a) has no effect without wandb_project"),
        ("--profile-step-start 5", "profile_step_start(5) has no effect without profile; drop it or give --profile"),
        ("--profile-ranks 0 1", "profile_ranks(0 1) has no effect without profile"),
    ],
)
def test_what_megatron_does_not_read_either_is_a_note(tmp_path: Path, flags: str, note: str) -> None:
    """As a flag and in a file. The run goes on."""
    common = "--bf16 --mock-data --vocab-size 512".split()
    line = parse_command_line([*common, *flags.split()])
    (said,) = line.notes
    assert said.startswith(note)
    check_config(line.config, 1)
    name, value = note.partition(")")[0].split("(")
    value = f"[{value.replace(' ', ', ')}]" if name == "profile_ranks" else value.lower()
    (tmp_path / "a.yaml").write_text(f"{name}: {value}\n")
    assert parse_command_line(["--config", str(tmp_path / "a.yaml"), *common]).notes == (said,)


BASE = "--bf16 --mock-data --vocab-size 512 --micro-batch-size 1"
FILES = "--bf16 --data-path a"
PIECES = f"{FILES} --tokenizer-type SentencePieceTokenizer --tokenizer-model m"
FOLDER = f"{FILES} --tokenizer-type HuggingFaceTokenizer --tokenizer-model m"
LEARNED, ROPE = (f"{BASE} --position-embedding-type {kind}" for kind in ("learned_absolute", "rope"))
CONSTANT, COSINE = (f"{BASE} --lr-decay-style {style}" for style in ("constant", "cosine"))
TENSORWISE = f"{BASE} --fp8-format hybrid --fp8-recipe tensorwise"
EXPERTS = f"{BASE} --num-experts 8 --disable-bias-linear"
#: What Megatron-LM 0.20 parses and then does not use: flags, and what they stand beside.
UNUSED = {
    BASE: [
        *("--save-interval 9", "--save-retain-interval 9", "--async-save", "--no-save-optim", "--no-save-rng"),
        *("--non-persistent-save-interval 9", "--no-load-optim", "--no-load-rng", "--override-opt_param-scheduler"),
        *("--use-checkpoint-opt_param-scheduler", "--no-use-tokenizer-model-from-checkpoint-args"),
        *(
            "--merge-file m",
            "--tiktoken-pattern v1",
            "--tokenizer-hf-no-include-special-tokens",
            "--lr-warmup-init 1e-6",
        ),
        *("--decoupled-min-lr 1e-6", "--fp8-amax-history-len 1024", "--fp8-amax-compute-algo most_recent"),
        *("--fp8-margin 1", "--first-last-layers-bf16", "--num-layers-at-start-in-bf16 2", "--num-query-groups 8"),
        *("--cp-comm-type a2a", "--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss"),
        *("--moe-router-topk 4", "--moe-aux-loss-coeff 0.01", "--moe-ffn-hidden-size 128", "--moe-layer-freq 2"),
        *(
            "--moe-router-score-function sigmoid",
            "--moe-token-dispatcher-type alltoall",
            "--moe-upcycling-granularity 2",
        ),
        *("--expert-tensor-parallel-size 1", "--account-for-embedding-in-pipeline-split"),
        *("--account-for-loss-in-pipeline-split", "--microbatch-group-size-per-virtual-pipeline-stage 4"),
        *("--recompute-num-layers 1", "--recompute-method uniform", "--recompute-modules mlp", "--hysteresis 1"),
        *("--initial-loss-scale 4096", "--sgd-momentum 0.8", "--lion-beta1 0.8", "--window-attn-skip-freq 2"),
        *("--no-data-sharding", "--fim-rate 0.9", "--fim-data", "--eval-global-batch-size 8"),
        *("--sft-tokenizer-prompt-format identity", "--wandb-exp-name a", "--wandb-save-dir a"),
        *("--profile-step-start 5", "--profile-ranks 1", "--eval-iters 7", "--split 9,1,0", "--no-mmap-bin-files"),
    ],
    f"{BASE} --save a --save-interval 5": ["--non-persistent-ckpt-type global"],
    f"{BASE} --num-experts 4 --moe-router-score-function sigmoid": ["--moe-router-pre-softmax"],
    FOLDER: ["--vocab-file v", "--merge-file m"],
    f"{FOLDER} --sft": ["--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss", "--no-mmap-bin-files"],
    PIECES: [
        *("--vocab-file v", "--merge-file m", "--tokenizer-hf-no-include-special-tokens", "--tiktoken-pattern v1"),
        *("--tiktoken-num-special-tokens 5", "--null-tokenizer-eod-id 3"),
    ],
    f"{FILES} --tokenizer-type NullTokenizer --vocab-size 512": ["--vocab-file v", "--tokenizer-model m"],
    f"{FILES} --tokenizer-type GPT2BPETokenizer --vocab-file v --merge-file m": ["--tokenizer-model m"],
    CONSTANT: ["--min-lr 1e-5", "--lr-decay-iters 99"],
    f"{CONSTANT} --train-samples 999": ["--lr-decay-samples 99"],
    COSINE: ["--lr-wsd-decay-style cosine", "--lr-wsd-decay-iters 9"],
    TENSORWISE: ["--fp8-amax-history-len 1024", "--fp8-amax-compute-algo most_recent", "--fp8-margin 1"],
    LEARNED: [
        *("--rotary-base 500000", "--rotary-percent 0.5", "--rotary-interleaved", "--use-rope-scaling"),
        "--rotary-seq-len-interpolation-factor 2",
    ],
    ROPE: ["--rope-scaling-factor 4", "--rotary-scaling-factor 4", "--mscale 0.7", "--yarn-beta-fast 16"],
    EXPERTS: [
        *("--moe-router-bias-update-rate 1e-2", "--moe-token-drop-policy position", "--moe-shared-expert-gate"),
        "--moe-token-dispatcher-type alltoall",
    ],
    f"{BASE} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1": [
        "--recompute-modules mlp"
    ],
    "--fp16 --mock-data --vocab-size 512 --loss-scale 1024": ["--loss-scale-window 500"],
    f"{BASE} --optimizer sgd": ["--adam-beta2 0.95"],
}


@pytest.mark.parametrize(("beside", "flag"), [(beside, flag) for beside, flags in UNUSED.items() for flag in flags])
def test_what_megatron_parses_and_does_not_use_is_a_note(beside: str, flag: str) -> None:
    """One line names the flag. Everything else is as without it."""
    line, without = parse_command_line(f"{beside} {flag}".split()), parse_command_line(beside.split())
    (note,) = set(line.notes) - set(without.notes)
    name = flag.split()[0].removeprefix("--").replace("-", "_").removeprefix("no_")
    assert name in note.replace("-", "_") and "no effect" in note
    check_config(line.config, 1, on_this_machine=False)
    others = {"split", "mmap_bin_files", "eval_iters"}  # of what nothing reads: `unread_settings`
    if name not in others:
        assert line.config == without.config


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--finetune", "finetune takes weights from load, which is not given; give --load"),
        ("--use-checkpoint-args", "use_checkpoint_args takes settings from load, which is not given; give --load"),
        ("--ckpt-step 5", "ckpt_step(5) names a checkpoint of load, which is not given; give --load"),
        ("--expert-model-parallel-size 2", "expert_model_parallel_size(2) has no effect without num_experts"),
        ("--num-virtual-stages-per-pipeline-rank 2", "num_virtual_stages_per_pipeline_rank(2) needs pipeline stages"),
        ("--loss-scale 8", "loss_scale(8.0) has no effect under precision(bf16)"),
        ("--full-validation --eval-interval 0 --data-path a --no-mock-data", "full_validation(True) has no effect"),
        ("--keep-last 2", "keep_last(2) has no effect without save; drop it or give --save"),
    ],
)
def test_an_error_stays_where_the_run_would_be_another(flags: str, problem: str) -> None:
    """Than the words say. Of this project's own settings no script knows that they do nothing."""
    words = f"{BASE} --tokenizer-type NullTokenizer {flags}".split()
    with pytest.raises(ConfigError) as error:
        check_config(parse_config(words), 2)
    assert problem in str(error.value)


@pytest.mark.parametrize(
    ("flags", "unread"),
    [
        ("", "with eval_interval(0) nothing reads valid_data_path(b c) and test_data_path(d); --eval-interval turns"),
        ("--eval-interval 5 --eval-iters 0", "with eval_iters(0) nothing reads valid_data_path(b c) and"),
        ("--eval-interval 5 --eval-iters 0 --full-validation", "with eval_iters(0) nothing reads test_data_path(d);"),
        ("--eval-interval 5", None),
    ],
)
def test_held_out_data_that_nothing_reads_is_said(tmp_path: Path, flags: str, unread: str | None) -> None:
    """As flags, in a file of settings, and in a file of paths."""
    (tmp_path / "a.yaml").write_text("train_data_path: a\nvalid_data_path: [b, c]\ntest_data_path: d\n")
    (tmp_path / "a.json").write_text('{"train": "a", "valid": "b c", "test": "d"}')
    for paths in (
        "--train-data-path a --valid-data-path b c --test-data-path d",
        f"--config {tmp_path}/a.yaml",
        f"--per-split-data-args-path {tmp_path}/a.json",
    ):
        notes = parse_command_line(["--bf16", *paths.split(), *flags.split()]).notes
        assert notes == () if unread is None else notes[0].startswith(unread)


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ("--eval-interval 1 --eval-iters 0", "eval_interval(1) with eval_iters(0) evaluates nothing; give"),
        ("--eval-interval 1 --eval-iters 0 --full-validation --data-path a", None),
        ("--eval-iters 0 --data-path a", None),
    ],
)
def test_an_interval_of_no_evaluation_is_said(flags: str, note: str | None) -> None:
    notes = [line for line in parse_command_line(["--bf16", *flags.split()]).notes if "evaluates nothing" in line]
    assert len(notes) == (note is not None) and all(line.startswith(str(note)) for line in notes)


def test_the_split_of_a_file_gives_way_to_paths_of_each_part() -> None:
    given = ["--config", str(CONFIGS / "gpt_7b.yaml")]
    assert parse_config(given).data.split == "969,31,0"
    assert parse_config([*given, "--train-data-path", "a"]).data.split == "969,30,1"
    assert parse_config([*given, "--train-data-path", "a", "--split", "9,1,0"]).data.split == "9,1,0"


@pytest.mark.parametrize(("hidden_size", "width"), [(4096, 10880), (5120, 13632), (8192, 21824), (768, 2048), (16, 64)])
def test_the_width_of_a_gated_mlp_is_megatrons(hidden_size: int, width: int) -> None:
    """⌊8/3 × hidden size⌋ rounded down to a multiple of 64, and at least 64."""
    model = dataclasses.replace(ModelConfig(), hidden_size=hidden_size, swiglu=True)
    assert model.padded_ffn_hidden_size == width
