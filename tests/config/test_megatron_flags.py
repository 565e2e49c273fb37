"""Megatron's options: every row of the table says what the parser does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fp8_megatron.config.checks import ConfigError, check_config
from fp8_megatron.config.command_line import setting_name
from fp8_megatron.config.fields import FieldType, field_types
from fp8_megatron.config.io import parse_command_line, parse_config
from fp8_megatron.config.megatron_flags import SWITCHES, Kind, Option, megatron_options, translate
from fp8_megatron.config.schema import Config

CONFIGS = Path(__file__).parents[2] / "configs"

OPTIONS = list({id(option): option for option in megatron_options().values()}.values())
TYPES: dict[str, FieldType] = {
    name: kind for section in vars(Config()).values() for name, kind in field_types(type(section)).items()
}
#: Spellings of options in Megatron-LM 0.20: those of its parser, and those that its arguments module adds by hand.
NUM_SPELLINGS = 865

CASES = [pytest.param(name, option, id=name) for option in OPTIONS for name in option.names]


def words_for(option: Option) -> list[str]:
    """A value that is not Megatron's default."""
    return ["99991"] if option.arity in ("1", "list") else []


def type_of(name: str) -> FieldType | None:
    """The type of the setting that a flag of ours sets; None if there is none."""
    name = setting_name(name)
    known = {**SWITCHES, **TYPES}
    if name not in known and name.startswith("no_") and known.get(name[3:], FieldType(str)).base is bool:
        name = name[3:]
    return known.get(name)


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ("--optimizer sgd", {"momentum": 0.9}),
        (
            "--optimizer sgd --sgd-momentum 0.8 --optimizer-options nesterov=true",
            {"momentum": 0.8, "nesterov": True},
        ),
        ("--optimizer lion --lion-beta1 0.9 --lion-beta2 0.99", {"betas": (0.9, 0.99)}),
    ],
)
def test_options_of_an_update_rule(flags: str, options: dict[str, object]) -> None:
    assert parse_command_line(["--bf16", *flags.split()]).config.optimizer.rule_options == options


def test_no_option_of_megatron_is_left_out() -> None:
    assert sum(len(option.names) for option in OPTIONS if option.source == "0.20") == NUM_SPELLINGS
    assert {option.arity for option in OPTIONS} == {"0", "1", "optional", "list"}
    assert {option.source for option in OPTIONS} == {"0.20", "older", "fork", "MS-AMP"}


@pytest.mark.parametrize(("name", "option"), CASES)
def test_a_row_says_what_the_parser_does(name: str, option: Option) -> None:
    words = [name, *words_for(option)]
    translation = translate(words)
    own = type_of(name)
    if option.kind is Kind.CANNOT:
        assert own is None, f"{name} is a flag of ours"
        with pytest.raises(ConfigError) as error:
            parse_config(words)
        assert str(error.value) == f"{' '.join(words)} is not supported: {option.note}"
        idle = [value for value in (option.default, *(pair.partition("=")[0] for pair in option.ours.split())) if value]
        assert option.note and all(pair.endswith("=") for pair in option.ours.split())
        for value in idle:
            line = parse_command_line([name, value])
            assert line.config == Config() and name in line.notes[0]
    elif option.kind is Kind.NOTHING:
        assert own is None, f"{name} is a flag of ours"
        line = parse_command_line(words)
        assert line.config == Config()
        assert line.notes[0] == f"no effect here: {' '.join(words)} (docs/from-megatron.md says why)"
        assert option.note and not option.ours
    elif option.ours:
        target = option.ours.split()[0]
        kind = type_of(target)
        assert kind is not None, f"{target} is no flag of ours"
        brought = option.ours.partition(" + ")[2].split()
        assert (kind.base is bool) == (len(translation.words) == 1) and translation.words[0] == target
        for theirs, ours in (pair.split("=") for pair in option.ours.split()[1:] if "=" in pair):
            line = translate([name, theirs])
            if ours:
                assert line.words == (target, ours, *brought)
                assert line.renamed == (f"{name} {theirs} is {' '.join((target, ours, *brought))} here",)
                assert ours in kind.choice_names or kind.base is int
            else:
                assert line.words == () and line.idle == (f"{name} {theirs}",)
        if option.arity == "0":
            line = parse_command_line(words)
            assert line.config != Config() or " has no effect " in line.notes[-2]
    else:
        assert own is not None, f"{name} is no flag of ours"
        assert translation.words == tuple(words)


def test_a_value_of_another_name_is_said() -> None:
    line = parse_command_line("--ckpt-format torch --attention-backend auto --precision fp8".split())
    assert line.config.checkpoint.ckpt_format == "torch_dist"
    assert line.notes == ("--ckpt-format torch is --ckpt-format torch_dist here",)


def test_names_of_forks_mean_megatrons() -> None:
    """As scripts of LUMI, llm-jp, BigScience and Swiss AI have them."""
    line = parse_command_line(
        "--bf16 --normalization rmsnorm --use-flash-attn-v2 --lr-decay-style WSD --lr-wsd-decay-style 1-sqrt "
        "--tokenizer-type PretrainedFromHF --tokenizer-name-or-path folder --wandb-project p --wandb-name n".split()
    )
    config = line.config
    assert config.model.normalization == "RMSNorm" and config.optimizer.lr_wsd_decay_style == "minus_sqrt"
    assert (config.data.tokenizer_type, config.data.tokenizer_model) == ("HuggingFaceTokenizer", "folder")
    assert config.logging.wandb_exp_name == "n"
    assert line.notes[-1] == "no effect here: --use-flash-attn-v2 (docs/from-megatron.md says why)"
    assert "--normalization rmsnorm is --normalization RMSNorm here" in line.notes
    assert "--lr-wsd-decay-style 1-sqrt is --lr-wsd-decay-style minus_sqrt here" in line.notes


@pytest.mark.parametrize(
    ("words", "meant", "said"),
    [
        (
            "--activations-checkpoint-method uniform --activations-checkpoint-num-layers 2",
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
            "--activations-checkpoint-method uniform is --recompute-method uniform --recompute-granularity full "
            "--recompute-num-layers 1 here",
        ),
        (
            "--activations-checkpoint-method=block",
            "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
            "--activations-checkpoint-method block is --recompute-method block --recompute-granularity full "
            "--recompute-num-layers 1 here",
        ),
        (
            "--checkpoint-num-layers 3 --checkpoint-activations",
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 3",
            "--checkpoint-num-layers 3 is --recompute-num-layers 3 here",
        ),
        (
            "--num-key-value-heads 8",
            "--group-query-attention --num-query-groups 8",
            "--num-key-value-heads 8 is --num-query-groups 8 --group-query-attention here",
        ),
        (
            "--attention-head-type multiquery",
            "--group-query-attention --num-query-groups 1",
            "--attention-head-type multiquery is --num-query-groups 1 --group-query-attention here",
        ),
        ("--attention-head-type multihead", "", None),
        (
            "--model-parallel-size 2 --batch-size 8 --position-embedding-type rotary",
            "--tensor-model-parallel-size 2 --micro-batch-size 8 --position-embedding-type rope",
            "--batch-size 8 is --micro-batch-size 8 here",
        ),
        (
            "--vocab a.json --merge b.txt",
            "--vocab-file a.json --merge-file b.txt",
            "--vocab a.json is --vocab-file a.json",
        ),
        ("--swig --hidden-s=64", "--swiglu --hidden-size 64", "--swig is --swiglu here"),
        ("--overlap-grad --no-overlap-grad-reduce", "--no-overlap-grad-reduce", "--overlap-grad is --overlap-grad-red"),
        (
            "--tokenizer-type TokenizerFromFile --tokenizer-file t.json",
            "--tokenizer-type HuggingFaceTokenizer --tokenizer-model t.json",
            "--tokenizer-type TokenizerFromFile is --tokenizer-type HuggingFaceTokenizer here",
        ),
        ("--trigger-path /t --deepspeed --zero-stage 1", "", None),
    ],
)
def test_other_names_of_one_meaning(words: str, meant: str, said: str | None) -> None:
    line = parse_command_line(["--bf16", *words.split()])
    assert line.config == parse_config(["--bf16", *meant.split()])
    assert said is None or any(note.startswith(said) for note in line.notes), line.notes


def test_a_deepspeed_file_is_flags(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps(
            {
                "train_batch_size": 64,
                "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": 2,
                "steps_per_print": 10,
                "gradient_clipping": 0.5,
                "zero_optimization": {"stage": 1, "reduce_bucket_size": 500, "offload_optimizer": {"device": "none"}},
                "fp16": {"enabled": False, "loss_scale": 0},
                "bf16": {"enabled": True},
                "data_types": {"grad_accum_dtype": "fp32"},
                "wall_clock_breakdown": True,
                "amp": {"enabled": False},
            }
        )
    )
    line = parse_command_line(["--deepspeed", "--deepspeed_config", str(path), "--micro-batch-size", "4"])
    meant = "--global-batch-size 64 --micro-batch-size 4 --clip-grad 0.5 --bf16 --accumulate-allreduce-grads-in-fp32"
    assert line.config == parse_config(meant.split())
    assert line.notes[0] == (
        "deepspeed_config means --global-batch-size 64 --clip-grad 0.5 --bf16 --accumulate-allreduce-grads-in-fp32 here"
    )
    scale = {"enabled": True, "initial_scale_power": 12, "loss_scale": 0, "hysteresis": 1, "min_loss_scale": 2}
    path.write_text(json.dumps({"fp16": scale}))
    optimizer = parse_config(["--deepspeed_config", str(path)]).optimizer
    assert (optimizer.initial_loss_scale, optimizer.hysteresis, optimizer.min_loss_scale) == (4096, 1, 2)
    assert optimizer.loss_scale is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"zero_optimization": {"stage": 3}}, "deepspeed_config: zero_optimization.stage: 3 has no flag here; drop it"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "zero_optimization.offload_optimizer"),
        ({"optimizer": {"type": "Adam"}}, "deepspeed_config: optimizer: {"),
        ({"gradient_accumulation_steps": 2}, "deepspeed_config: gradient_accumulation_steps: 2 has no flag"),
        ({"bf16": {"enabled": True, "immediate_grad_update": True}}, "bf16.immediate_grad_update: true has no flag"),
        ({"gradient_clipping": 2}, "deepspeed_config: gradient_clipping(2) contradicts --clip-grad 1.0; make them one"),
        ([1], "cannot be read (it is no object); give DeepSpeed's JSON file"),
    ],
)
def test_what_a_deepspeed_file_cannot_ask_for(tmp_path: Path, content: object, said: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError) as error:
        parse_config(["--clip-grad", "1.0", "--deepspeed_config", str(path)])
    assert said in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(ConfigError, match=r"deepspeed_config\(.*\) cannot be read \(No such file"):
        parse_config(["--deepspeed_config", f"{path}.no"])


def test_local_sums_of_gradients_name_the_setting_that_makes_them_fp32() -> None:
    """Few gradients of FP8 weights are added in BF16 by default, so FP32 is not what happens anyway."""
    note = megatron_options()["ddp_param_name_patterns_for_fp32_local_accumulation"].note
    assert "in BF16, and in FP32 with --grad-accumulation-dtype fp32" in note


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", None),
        ("--accumulate-allreduce-grads-in-fp32", "fp32"),
        ("--accumulate-allreduce-grads-in-fp32 --bf16 --fp8-format hybrid", "fp32"),
        ("--accumulate-allreduce-grads-in-fp32 --grad-accumulation-dtype fp32", "fp32"),
        (f"--accumulate-allreduce-grads-in-fp32 --config {CONFIGS}/fast.yaml", "fp32"),
        ("--accumulate-allreduce-grads-in-fp32 --bf16", None),  # there sums are FP32
        ("--accumulate-allreduce-grads-in-fp32 --precision te", None),
    ],
)
def test_fp32_sums_are_what_the_switch_asks_for(flags: str, expected: str | None) -> None:
    assert parse_config(flags.split()).precision.grad_accumulation_dtype == expected


def test_fp32_sums_contradict_bf16_sums() -> None:
    with pytest.raises(ConfigError, match="-in-fp32 contradicts --grad-accumulation-dtype bf16; give one of them"):
        parse_config("--accumulate-allreduce-grads-in-fp32 --grad-accumulation-dtype bf16".split())


def test_words_after_an_option_are_its_own() -> None:
    line = parse_command_line(
        "--use-mcore-models --num-layers 3 --timing-log-level=2 --ckpt-fully-parallel-load --lr 1 "
        "--high-priority-stream-groups a b --mock-data --precision fp8".split()
    )
    assert (line.config.model.num_layers, line.config.optimizer.lr, line.config.data.mock_data) == (3, 1.0, True)
    assert line.notes == (
        "no effect here: --use-mcore-models --timing-log-level 2 --ckpt-fully-parallel-load "
        "--high-priority-stream-groups a b (docs/from-megatron.md says why)",
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--use-mcore-models", "stray"], "'stray' belongs to no flag; put one before it, or drop it"),
        (["--use-mcore-models=1"], "--use-mcore-models=1: a switch has no value; give it alone"),
        (["--distributed-backend"], "--distributed-backend has no value; give one after it, or drop it"),
        (["--use-mcore-modle"], "unknown flag --use-mcore-modle; did you mean --use-mcore-models?"),
        (["--overide-opt-param-scheduler"], "did you mean --override-opt"),
        (["--nun-experts", "8"], "unknown flag --nun-experts; did you mean --num-experts?"),
        (["--goldfish-loss"], "unknown flag --goldfish-loss; --help lists the flags"),
        (["--moe"], "unknown flag --moe; --help lists the flags"),
        (["--multi-latent"], "--multi-latent-attention is not supported: there is no"),
        (["--zero-stage", "2"], "--zero-stage 2 is not supported: weights and gradients are not sharded as in ZeRO"),
        (["--data-impl", "lazy"], "--data-impl lazy is not supported: token files are mapped"),
        (["--moe-latent-size", "8"], "--moe-latent-size 8 is not supported: experts have the width of the model"),
        (["--attention-backend", "quick"], "--attention-backend 'quick' is not one of auto, cudnn, flash, math"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(words)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("flags", "precision", "recipe", "level"),
    [
        ("", "fp8", "delayed", "O3"),
        ("--bf16", "bf16", "delayed", "O3"),
        ("--fp16", "fp16", "delayed", "O3"),
        ("--fp16 --no-fp16", "fp8", "delayed", "O3"),
        ("--bf16 --fp8-format hybrid", "fp8", "delayed", "O3"),
        ("--fp8-format e4m3 --fp8-recipe blockwise", "fp8", "blockwise", "O3"),
        ("--fp8-format e4m3 --fp8-recipe mxfp8", "fp8", "mxfp8", "O3"),
        ("--bf16 --fp8-hybrid --transformer-impl local", "fp8", "delayed", "O3"),
        ("--bf16 --fp8-hybrid --transformer-impl transformer_engine", "te", "delayed", "O3"),
        ("--bf16 --fp8-hybrid --transformer-impl transformer_engine --msamp", "fp8", "delayed", "O3"),
        ("--bf16 --transformer-impl transformer_engine", "bf16", "delayed", "O3"),
        ("--transformer-impl transformer_engine", "fp8", "delayed", "O3"),
        ("--bf16 --fp8-recipe tensorwise --fp8-format hybrid", "fp8", "tensorwise", "O3"),
        ("--bf16 --fp8-recipe delayed", "fp8", "delayed", "O3"),
        ("--fp16 --msamp --msamp-opt-level O2", "fp8", "delayed", "O2"),
        ("--bf16 --msamp", "fp8", "delayed", "O3"),
        ("--precision fp8 --bf16", "fp8", "delayed", "O3"),
        ("--precision te --bf16 --fp8-format hybrid", "te", "delayed", "O3"),
        ("--precision bf16 --bf16", "bf16", "delayed", "O3"),
    ],
)
def test_the_precision_that_switches_choose(flags: str, precision: str, recipe: str, level: str) -> None:
    found = parse_config(flags.split()).precision
    assert (found.precision, found.fp8_recipe, found.opt_level) == (precision, recipe, level)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--bf16 --fp16", "--bf16 contradicts --fp16; give one of them"),
        ("--precision bf16 --fp16", "--fp16 contradicts --precision bf16; give one of them"),
        ("--precision bf16 --fp8-format hybrid", "--fp8-format contradicts --precision bf16; give one of them"),
        ("--precision fp16 --msamp", "--msamp contradicts --precision fp16; give one of them"),
        ("--precision te --msamp", "--msamp contradicts --precision te; give one of them"),
        ("--msamp-opt-level O2 --opt-level O3", "--msamp-opt-level O2 contradicts --opt-level O3; give one of them"),
        ("--fp8-format e5m2", "--fp8-format 'e5m2' is not one of hybrid, e4m3"),
        ("--fp8-e4m3", "--fp8-e4m3: output gradients are E5M2 under fp8_recipe(delayed)"),
        ("--fp8-format e4m3 --fp8-recipe tensorwise", "--fp8-format e4m3: output gradients are E5M2 under fp8_recipe"),
        ("--transformer-impl inference_optimized", "is not one of transformer_engine, local"),
        ("--fp8-recipe custom", "--fp8-recipe 'custom' is not one of tensorwise, delayed, blockwise, mxfp8"),
    ],
)
def test_switches_that_contradict_each_other(flags: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(flags.split())
    assert said in str(error.value) and "\n" not in str(error.value)


def test_switches_over_a_file(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("precision: te\nfp8_recipe: tensorwise")
    given = ["--config", str(path)]
    assert parse_config([*given, "--fp8-recipe", "delayed"]).precision.precision == "te"
    switched = parse_config([*given, "--fp8-format", "hybrid"]).precision
    assert (switched.precision, switched.fp8_recipe) == ("te", "tensorwise")
    assert parse_config([*given, "--msamp"]).precision.precision == "fp8"
    path.write_text("precision: bf16")
    with pytest.raises(ConfigError, match=r"--fp8-hybrid contradicts precision\(bf16\) of the --config files"):
        parse_config([*given, "--fp8-hybrid"])
    assert parse_config([*given, "--fp8-hybrid", "--precision", "fp8"]).precision.precision == "fp8"


def test_fp16_beside_fp8_is_said() -> None:
    assert parse_command_line(["--fp16", "--msamp"]).notes == (
        "--fp16 beside --msamp: the 16-bit type of FP8 layers is BF16, without a loss scale",
    )


def test_a_batch_is_not_made_smaller() -> None:
    """--decrease-batch-size-if-needed changes nothing where ranks share a batch evenly. Elsewhere there is an error."""
    words = "--bf16 --mock-data --vocab-size 512 --micro-batch-size 1 --global-batch-size 8".split()
    config = parse_config([*words, "--decrease-batch-size-if-needed"])
    check_config(config, 4)
    with pytest.raises(
        ConfigError, match=r"global_batch_size\(8\) is not a multiple of micro_batch_size\(1\) × data-pa"
    ):
        check_config(config, 3)
