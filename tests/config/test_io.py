"""Reading, writing and printing the configuration."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import yaml

from fp8_megatron.config.checks import ConfigError
from fp8_megatron.config.fields import field_types
from fp8_megatron.config.io import (
    config_text,
    format_changes,
    format_config,
    load_config,
    own_and_run_flags,
    parse_command_line,
    parse_config,
)
from fp8_megatron.config.learning_rate import LearningRateSchedule
from fp8_megatron.config.schema import (
    Config,
    DataConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    TrainingConfig,
)
from fp8_megatron.dtypes import StorageDtype


def write(folder: Path, text: str) -> str:
    path = folder / "x.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def field_names() -> list[str]:
    sections = [getattr(Config(), section.name) for section in dataclasses.fields(Config)]
    return [field.name for section in sections for field in dataclasses.fields(section)]


def test_field_names_are_unique_over_sections() -> None:
    assert [name for name, count in Counter(field_names()).items() if count > 1] == []


def test_no_arguments_give_the_defaults() -> None:
    assert parse_config([]) == Config()


def test_flags_are_flat_and_typed() -> None:
    config = parse_config(
        "--num-layers 3 --lr 3e-4 --sequence-parallel --tensor-model-parallel-size 2 --no-tensorboard "
        "--exp-avg-sq-dtype fp32 --opt-level O2 "
        "--data-path 0.3 a 0.7 b --ffn-hidden-size 256 --recompute-granularity full --seq_length 64".split()
    )
    assert config.model == ModelConfig(num_layers=3, ffn_hidden_size=256, seq_length=64)
    assert config.optimizer.lr == 3e-4
    assert config.parallel.sequence_parallel
    assert config.logging == LoggingConfig(tensorboard=False)
    assert config.precision == PrecisionConfig(opt_level="O2", exp_avg_sq_dtype=StorageDtype.FP32)
    assert config.data.data_path == ("0.3", "a", "0.7", "b")
    assert config.training.recompute_granularity == "full"


@pytest.mark.parametrize("text", ["model: {num_layers: 6, seq_length: 32}", "num_layers: 6\nseq_length: 32"])
def test_a_flag_overrides_the_file(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, text)
    config = parse_config(["--num-layers", "8", "--config", path])
    assert config.model == ModelConfig(num_layers=8, seq_length=32)
    assert parse_config([f"--config={path}"]).model.num_layers == 6


def test_none_unsets_an_optional_value_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "save: somewhere\nparams_dtype: fp8\nseed: 7")
    config = parse_config(["--config", path, "--save", "none", "--params-dtype", "none"])
    assert config.checkpoint.save is None
    assert config.precision.params_dtype is None
    assert config.training.seed == 7


def test_bf16_means_precision_bf16(tmp_path: Path) -> None:
    path = write(tmp_path, "precision: fp8\nopt_level: O2")
    assert parse_config(["--config", path, "--bf16"]).precision == PrecisionConfig(precision="bf16", opt_level="O2")
    assert parse_config(["--bf16", "--precision", "bf16"]).precision.precision == "bf16"
    assert parse_config(["--precision=te", "--bf16"]).precision.precision == "te"
    assert parse_config(["--fp16"]).precision.precision == "fp16"
    with pytest.raises(ConfigError, match="--bf16 contradicts --fp16"):
        parse_config(["--fp16", "--bf16"])


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--nun-layers", "3"], "unknown flag --nun-layers; did you mean --num-layers?"),
        (["--fp64"], "unknown flag --fp64; --help lists the flags"),
        (["--zzzzzz", "3", "4"], "unknown flag --zzzzzz; --help lists the flags"),
        (["--num-layers", "1.5"], "--num-layers '1.5' is not a whole number"),
        (["--num-layers", "1__000"], "--num-layers '1__000' is not a whole number"),
        (["--num-layers", "_1"], "--num-layers '_1' is not a whole number"),
        (["--num-layers", "1_"], "--num-layers '1_' is not a whole number"),
        (["--num-layers=\uff11\uff12"], "--num-layers '\uff11\uff12' is not a whole number"),
        (["--seed", " 7"], "--seed ' 7' is not a whole number"),
        (["--seed", "9" * 5000], f"--seed '{'9' * 77}...' is not a whole number"),
        (["--lr", "\u0661e-3"], "--lr '\u0661e-3' is not a number"),
        (["--lr", "1_0.0"], "--lr '1_0.0' is not a number"),
        (["--lr="], "--lr '' is not a number"),
        (["--lr"], "--lr has no value; give one after it, or drop it (an unset shell variable?)"),
        (["--lr", "--seed", "3"], "--lr has no value"),
        (["--data-path", "--mock-data"], "--data-path has no value"),
        (["--mock-data=true"], "--mock-data=true: a switch has no value; give it alone, or as --no-…"),
        (["--mock-data", "yes"], "'yes' belongs to no flag; put one before it, or drop it"),
        (["--ffn-hidden-size", "wide"], "--ffn-hidden-size 'wide' is not a whole number or none"),
        (["--exp-avg-dtype", "uint8"], "--exp-avg-dtype 'uint8' is not one of fp32, bf16, fp16, fp8, int8 or none"),
        (["--exp-avg-sq-dtype", "int8"], "int8"),
        (["--main-params-dtype", "int8"], "int8"),
        (["--main-grads-dtype", "fp16"], "fp16"),
        (["--params-dtype", "split"], "split"),
        (["--precision", "fp4"], "--precision 'fp4' is not one of bf16, fp16, te, fp8"),
        (["stray"], "'stray' belongs to no flag"),
        (["--no-num-layers"], "unknown flag --no-num-layers"),
        (["--config"], "--config has no value"),
        (["--config", ""], "--config is empty (an unset shell variable?)"),
    ],
)
def test_a_bad_flag_is_one_line(argv: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(argv)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_whole_numbers_may_have_underscores() -> None:
    """As Python writes them, and so Megatron's ``type=int``: also in fields of other numbers and in lists."""
    words = "--fp16 --train-samples 220_000_000 --seed +1_0 --initial-loss-scale 4_294_967_296 --global-batch-size 6_4"
    config = parse_config([*words.split(), "--rampup-batch-size", "1_6", "1_6", "1_000"])
    assert (config.training.train_samples, config.training.seed) == (220_000_000, 10)
    assert config.optimizer.initial_loss_scale == 2.0**32
    assert config.batch_schedule(1).batches_from(0) == [16, 32, 48, 64]


def test_all_bad_flags_come_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(["--num-layrs", "3", "--lr", "fast", "stray", "--seed"])
    assert len(str(error.value).splitlines()) == 4


def test_every_form_of_a_flag() -> None:
    words = ["--num_layers=3", "--no-tensorboard", "--data-path", "-a", "b", "--min-lr", "-0.0", "--save=a=b"]
    config = parse_config(words)
    assert (config.model.num_layers, config.logging.tensorboard, config.checkpoint.save) == (3, False, "a=b")
    assert config.data.data_path == ("-a", "b") and parse_config([*words, "--data-path", "none"]).data.data_path == ()


def test_a_flag_that_is_given_twice_counts_last_and_is_noted(tmp_path: Path) -> None:
    path = write(tmp_path, "lr: 3")
    words = ["--config", path, "--lr", "1", "--lr=2", "--seed", "1", "--seed", "1", "--bf16", "--no-bf16"]
    config = parse_config([*words, "--config", path])
    assert (config.optimizer.lr, config.precision.precision) == (2.0, "fp8")
    assert list(parse_command_line(words).notes[:2]) == [
        "--lr is given 2 times; the last one counts: --lr 2",
        "--bf16 is given 2 times; the last one counts: --no-bf16",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {num_layer: 4}", "unknown key 'model.num_layer'; did you mean 'num_layers'?"),
        ("num-layers: 4", "unknown key 'num-layers'; did you mean 'num_layers'?"),
        ("modle: {num_layers: 4}", "unknown key 'modle'; did you mean 'model'?"),
        ("zzzzzz: 4", "unknown key 'zzzzzz'; --help lists the names"),
        ("model: {lr: 4}", "unknown key 'model.lr'; 'lr' belongs under 'optimizer'"),
        ("num_layers: abc", "num_layers: 'abc' is not a whole number"),
        ("model: {num_layers: 4.0}", "model.num_layers: 4.0 is not a whole number"),
        ("num_layers: true", "num_layers: True is not a whole number"),
        ("num_layers: null", "num_layers: None is not a whole number"),
        ("lr: fast", "lr: 'fast' is not a number"),
        ("sequence_parallel: 1", "sequence_parallel: 1 is not true or false"),
        ("sequence_parallel: yes", "sequence_parallel: 'yes' is not true or false"),
        ("save: 3", "save: 3 is not a string or null"),
        ("params_dtype: int4", "params_dtype: 'int4' is not one of fp32, bf16, fp16, fp8 or null"),
        ("opt_level: O4", "opt_level: 'O4' is not one of O1, O2, O3"),
        ("data_path: [[a]]", "data_path: [['a']] is not a list of strings"),
        ("model: {seed: 1}", "'seed' belongs under 'training'"),
        ("model: {num_layers: 4}\nnum_layers: 6", "'num_layers' is given twice"),
        ("num_layers: 4\nnum_layers: 6", "key 'num_layers' is given twice"),
        ("[1, 2]", "holds a list; expected a mapping"),
        ("model: {num_layers: 4", ":1:"),
        ("model: 3", "'model' is a section, not a setting; write it as model: {name: value}"),
        ("num_layers: 1_000", "num_layers: '1_000' is not a whole number"),
        ("num_layers: \uff11", "num_layers: '\uff11' is not a whole number"),
        ("num_layers: " + "9" * 5000, "not valid YAML: Exceeds the limit"),
        ("lr: " + "9" * 4000, "is not a number"),
        ("num_layers: !!int '3'", "settings have no tags; leave out tag:yaml.org,2002:int"),
        ("a: !!python/object/apply:os.system [ls]", "settings have no tags"),
        ("a: " + "[" * 100_000, "nested deeper than 20 levels"),
        ("- " * 100_000, "nested deeper than 20 levels"),
        ("lr: [&a [" + "x, " * 9 + "], &b [" + "*a, " * 9 + "], " + "*b, " * 9 + "]", "is not a number"),
        ("lr: &a [*a]", "is not a number"),
        ("{[1]: 2}", "not valid YAML"),
        ("1: 2", "unknown key '1'"),
        ("lr: \x01", "not valid YAML: unacceptable character"),
        ("# " + "x" * 1_000_000, "has more than 1,000,000 bytes; give a file of settings"),
        ("model:\n\t- 3", "not valid YAML"),
    ],
)
def test_a_bad_file_is_named_with_key_and_value(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert str(error.value).startswith(path)
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_what_is_no_file_of_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"lr: 1 # \xff")
    os.mkfifo(tmp_path / "pipe")
    for path, said in (
        (tmp_path / "x", "byte 8 is not UTF-8 text; check --config"),
        (tmp_path / "pipe", "--config takes files, which every rank reads again; this is none"),
        (tmp_path, "--config takes files"),
        (Path("/dev/zero"), "--config takes files"),
        (tmp_path / "x" / "y", "cannot read the configuration file: Not a directory"),
    ):
        with pytest.raises(ConfigError, match=f"^{path}: {said}"):
            load_config(path)


def test_all_problems_of_a_file_come_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(write(tmp_path, "num_layer: 4\nlr: fast\nmodel: {hidden_size: x}"))
    assert len(str(error.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("first", "second", "flags", "expected"),
    [
        ("lr_warmup_fraction: 0.1", "", "", (0.1, 0)),
        ("lr_warmup_fraction: 0.1", "", "--lr-warmup-iters 5", (None, 5)),
        ("lr_warmup_fraction: 0.1", "", "--lr_warmup_iters=5", (None, 5)),
        ("lr_warmup_fraction: 0.1", "lr_warmup_iters: 5", "", (None, 5)),
        ("lr_warmup_iters: 5", "lr_warmup_fraction: 0.1", "", (0.1, 0)),
        ("lr_warmup_iters: 5", "", "--lr-warmup-fraction 0.1", (0.1, 0)),
        ("lr_warmup_fraction: 0.1\nlr_warmup_iters: 5", "", "", (0.1, 5)),
        ("", "", "--lr-warmup-fraction 0.1 --lr-warmup-iters 5", (0.1, 5)),
    ],
)
def test_the_warm_up_that_is_given_later_stands_alone(
    tmp_path: Path, first: str, second: str, flags: str, expected: tuple[float | None, int]
) -> None:
    """Both at once, which the checks refuse, stay as they are."""
    paths = [str(tmp_path / "first.yaml"), str(tmp_path / "second.yaml")]
    for path, text in zip(paths, (first, second), strict=True):
        Path(path).write_text(text)
    optimizer = parse_config(["--config", *paths, *flags.split()]).optimizer
    assert (optimizer.lr_warmup_fraction, optimizer.lr_warmup_iters) == expected


@pytest.mark.parametrize(
    ("settings", "train_iters", "expected"),
    [
        ({}, 10, 0),
        ({"lr_warmup_iters": 4}, 10, 4),
        ({"lr_warmup_iters": 10}, 10, 9),
        ({"lr_warmup_iters": 2000}, 1, 0),
        ({"lr_warmup_iters": 15, "lr_decay_iters": 20}, 10, 15),
        ({"lr_warmup_fraction": 0.25}, 10, 2.5),
        ({"lr_warmup_fraction": 0.99}, 10, 9.9),
        ({"lr_warmup_fraction": 0.01}, 100_000, 1000),
        ({"lr_warmup_fraction": 0.5, "lr_decay_iters": 20}, 10, 10),
    ],
)
def test_steps_of_the_warm_up(settings: dict[str, Any], train_iters: int, expected: float) -> None:
    """A fraction need not give whole steps; a warm-up in steps is cut where the run is too short for it."""
    training = TrainingConfig(micro_batch_size=3, global_batch_size=12, train_iters=train_iters)
    schedule = LearningRateSchedule.of(Config(optimizer=OptimizerConfig(**settings), training=training), 1)
    assert schedule.warmup_samples == pytest.approx(12 * expected)


@pytest.mark.parametrize("repeats_the_flag", [False, True])
def test_a_file_overrides_those_before_it(tmp_path: Path, repeats_the_flag: bool) -> None:
    files = []
    for name, text in (("first", "num_layers: 4\nmodel: {hidden_size: 512}\nlr: 1e-3"), ("second", "num_layers: 6")):
        path = tmp_path / f"{name}.yaml"
        path.write_text(text)
        files.append(str(path))
    given = ["--config", files[0], "--config", files[1]] if repeats_the_flag else ["--config", *files]
    config = parse_config([*given, "--lr", "1e-4"])
    assert (config.model.num_layers, config.model.hidden_size, config.optimizer.lr) == (6, 512, 1e-4)
    with pytest.raises(ConfigError, match=r"second\.yaml: unknown key 'num_layer'"):
        Path(files[1]).write_text("num_layer: 6")
        parse_config(given)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nope\.yaml: cannot read the configuration file: No such file"):
        parse_config(["--config", "nope.yaml"])


@pytest.mark.parametrize(
    ("argv", "own", "passed"),
    [
        (["--runs", "O3", "--", "--mock-data", "--", "x"], ["--runs", "O3"], ["--mock-data", "--", "x"]),
        (["--runs", "O3"], ["--runs", "O3"], []),
        (["--"], [], []),
    ],
)
def test_what_stands_after_two_dashes_is_the_runs(argv: list[str], own: list[str], passed: list[str]) -> None:
    assert own_and_run_flags(argv) == (own, passed)


def test_scalars_that_yaml_1_1_misreads(tmp_path: Path) -> None:
    scalars = "lr: 3e-4\nmin_lr: 1E-5\nprogress: off\nwandb_exp_name: 1:30\nclip_grad: 1"
    text = scalars + "\nsplit: 9,1,0\ndata_path: [0.3, a, 1, b]"
    config = load_config(write(tmp_path, text))
    assert (config.optimizer.lr, config.optimizer.min_lr) == (3e-4, 1e-5)
    assert type(config.optimizer.clip_grad) is float
    assert config.logging == LoggingConfig(progress="off", wandb_exp_name="1:30")
    assert config.data == DataConfig(split="9,1,0", data_path=("0.3", "a", "1", "b"))


def test_one_path_needs_no_list_and_empty_sections_are_allowed(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "data_path: a\nmodel:\noptimizer:\n")).data.data_path == ("a",)
    assert load_config(write(tmp_path, "# nothing yet\n")) == Config()


def changed(section: object) -> object:
    """The section with every field away from its default, strings such that a careless writer would lose their type."""
    awkward = cycle(["1e-4", "off", "null", "1:30", "12", "é # x: y", "~", "[a]", "true"])
    updates: dict[str, object] = {}
    for name, kind in field_types(type(section)).items():
        value = getattr(section, name)
        if kind.base is bool:
            updates[name] = not value
        elif kind.choices:
            updates[name] = [choice for choice in kind.choices if choice != value or len(kind.choices) == 1][-1]
        elif kind.base in (int, float):
            updates[name] = kind.base(7 if value is None else value * 3 + 1)
        else:
            updates[name] = (next(awkward), "0.5", "-x") if kind.base is tuple else next(awkward)
    return dataclasses.replace(section, **updates)  # type: ignore[type-var]


def test_save_then_load_is_the_identity(tmp_path: Path) -> None:
    sections = {section.name: changed(getattr(Config(), section.name)) for section in dataclasses.fields(Config)}
    config = Config(**sections)  # type: ignore[arg-type]
    path = tmp_path / "config.yaml"
    for expected in (config, Config()):
        path.write_text(config_text(expected))
        assert load_config(path) == expected
        by_other_readers = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert by_other_readers["logging"]["wandb_exp_name"] == expected.logging.wandb_exp_name
    assert parse_config(["--config", str(path)]) == Config()


def test_format_marks_what_differs() -> None:
    config = Config(
        model=ModelConfig(num_layers=2),
        precision=PrecisionConfig(exp_avg_dtype=StorageDtype.FP32),
        data=DataConfig(data_path=("a", "b")),
        training=TrainingConfig(seed=TrainingConfig().seed),
    )
    lines = format_config(config).splitlines()
    assert [line for line in lines if line.startswith("  *")] == [
        "  * num_layers = 2  (default 24)",
        "  * data_path = a b  (default none)",
        "  * exp_avg_dtype = fp32  (default none)",
    ]
    assert "    seed = 1234" in lines
    assert len(lines) == len(field_names()) + len(dataclasses.fields(Config))
    assert format_changes(config).splitlines() == [
        *("model:", "  num_layers = 2  (default 24)"),
        *("data:", "  data_path = a b  (default none)"),
        *("precision:", "  exp_avg_dtype = fp32  (default none)"),
    ]
    assert format_changes(Config()) == ""
