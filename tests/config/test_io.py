"""Reading, writing and printing the configuration."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import pytest
import yaml

from fp8_megatron.config.checks import ConfigError
from fp8_megatron.config.io import format_config, load_config, own_and_run_flags, parse_config, save_config
from fp8_megatron.config.schema import Config, DataConfig, LoggingConfig, ModelConfig, PrecisionConfig, TrainingConfig
from fp8_megatron.formats import GradReduceMode, StorageDtype


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
        "--num-layers 3 --lr 3e-4 --sequence-parallel --no-tensorboard --exp-avg-sq-dtype fp32 --opt-level O2 "
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
    with pytest.raises(ConfigError, match="--bf16 contradicts --precision te"):
        parse_config(["--precision=te", "--bf16"])
    assert parse_config(["--fp16"]).precision.precision == "fp16"
    with pytest.raises(ConfigError, match="--bf16 contradicts --fp16"):
        parse_config(["--fp16", "--bf16"])


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--num-layer", "3"], "--num-layers INT"),
        (["--fp64"], "--fp64"),
        (["--num-layers", "1.5"], "1.5"),
        (["--ffn-hidden-size", "wide"], "wide"),
        (["--exp-avg-dtype", "int4"], "int4"),
        (["--precision", "fp4"], "fp4"),
        (["stray"], "stray"),
    ],
)
def test_a_bad_flag_exits_with_code_2(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse_config(argv)
    assert exit_info.value.code == 2
    assert said in capsys.readouterr().err


def test_help_lists_every_field_with_readable_metavars(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse_config(["--help"], prog="pretrain_gpt.py")
    text = capsys.readouterr().out
    assert exit_info.value.code == 0
    assert [name for name in field_names() if "--" + name.replace("_", "-") not in text] == []
    for line in (
        "--ffn-hidden-size INT",
        "--params-dtype {fp32,bf16,fp16,fp8,int8,uint8,split}",
        "--data-path STR [STR ...]",
        "--save STR",
        "--config FILE.yaml",
        "--sequence-parallel, --no-sequence-parallel",
    ):
        assert line in text
    assert "{None" not in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {num_layer: 4}", "unknown key 'model.num_layer'; did you mean 'num_layers'?"),
        ("num-layers: 4", "unknown key 'num-layers'; did you mean 'num_layers'?"),
        ("modle: {num_layers: 4}", "unknown key 'modle'; did you mean 'model'?"),
        ("zzzzzz: 4", "unknown key 'zzzzzz'; --help lists the names"),
        ("model: {lr: 4}", "unknown key 'model.lr'; 'lr' belongs under 'optimizer'"),
        ("num_layers: abc", "num_layers: 'abc' is not int"),
        ("model: {num_layers: 4.0}", "model.num_layers: 4.0 is not int"),
        ("num_layers: true", "num_layers: True is not int"),
        ("num_layers: null", "num_layers: None is not int"),
        ("lr: fast", "lr: 'fast' is not float"),
        ("sequence_parallel: 1", "sequence_parallel: 1 is not true or false"),
        ("sequence_parallel: yes", "sequence_parallel: 'yes' is not true or false"),
        ("save: 3", "save: 3 is not a string or null"),
        ("params_dtype: int4", "params_dtype: 'int4' is not one of fp32, bf16, fp16, fp8, int8, uint8, split or null"),
        ("opt_level: O4", "opt_level: 'O4' is not one of O1, O2, O3"),
        ("data_path: [[a]]", "data_path: [['a']] is not a list of strings"),
        ("model: {seed: 1}", "'seed' belongs under 'training'"),
        ("model: {num_layers: 4}\nnum_layers: 6", "'num_layers' is given twice"),
        ("num_layers: 4\nnum_layers: 6", "key 'num_layers' is given twice"),
        ("[1, 2]", "holds a list; expected a mapping"),
        ("model: {num_layers: 4", ":1:"),
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


def test_all_problems_of_a_file_come_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(write(tmp_path, "num_layer: 4\nlr: fast\nmodel: {hidden_size: x}"))
    assert len(str(error.value).splitlines()) == 3


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
    awkward = iter(["1e-4", "off", "null", "1:30", "12", "é # x: y", "~", "[a]", "true"])
    updates: dict[str, object] = {}
    for field in dataclasses.fields(section):  # type: ignore[arg-type]
        value, annotation = getattr(section, field.name), str(field.type)
        if isinstance(value, bool):
            updates[field.name] = not value
        elif "StorageDtype" in annotation:
            updates[field.name] = StorageDtype.FP16
        elif "GradReduceMode" in annotation:
            updates[field.name] = GradReduceMode.NCCL
        elif isinstance(value, int | float):
            updates[field.name] = value * 3 + type(value)(1)
        elif "tuple" in annotation:
            updates[field.name] = (next(awkward), "0.5", "-x")
        elif "Literal" not in annotation and annotation not in ("Precision", "OptLevel", "FP8Recipe"):
            updates[field.name] = 7 if "int" in annotation else 1e-7 if "float" in annotation else next(awkward)
    return dataclasses.replace(section, **updates)  # type: ignore[type-var]


def test_save_then_load_is_the_identity(tmp_path: Path) -> None:
    sections = {section.name: changed(getattr(Config(), section.name)) for section in dataclasses.fields(Config)}
    config = Config(**sections)  # type: ignore[arg-type]
    config = dataclasses.replace(
        config,
        training=dataclasses.replace(config.training, recompute_granularity="selective"),
        precision=dataclasses.replace(config.precision, precision="te", opt_level="O1", fp8_recipe="delayed"),
    )
    path = tmp_path / "new" / "config.yaml"
    for expected in (config, Config()):
        save_config(expected, path)
        assert load_config(path) == expected
        assert parse_config(["--config", str(path)]) == expected
        by_other_readers = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert by_other_readers["logging"]["wandb_exp_name"] == expected.logging.wandb_exp_name


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
        "  * exp_avg_dtype = fp32  (default none)",
        "  * data_path = a b  (default none)",
    ]
    assert "    seed = 1234" in lines
    assert len(lines) == len(field_names()) + len(dataclasses.fields(Config))
