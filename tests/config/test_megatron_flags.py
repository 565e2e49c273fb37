"""Megatron's options: every row of the table says what the parser does."""

from __future__ import annotations

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
        assert option.note and not option.ours
        if option.default:
            line = parse_command_line([name, option.default])
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
        assert (kind.base is bool) == (len(translation.words) == 1) and translation.words[0] == target
        for theirs, ours in (pair.split("=") for pair in option.ours.split()[1:] if "=" in pair):
            assert translate([name, theirs]).words == (target, ours)
            assert translate([name, theirs]).renamed == (f"{name} {theirs} is {target} {ours} here",)
            assert ours in kind.choice_names
        if option.arity == "0":
            assert parse_config(words) != Config()
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
        (["--use-mcore-model"], "unknown flag --use-mcore-model; did you mean --use-mcore-models?"),
        (["--overide-opt-param-scheduler"], "did you mean --override-opt"),
        (["--num-expert", "8"], "unknown flag --num-expert; did you mean --num-experts?"),
        (["--multi-latent"], "unknown flag --multi-latent; --help lists the flags"),
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
