"""benchmarks/headline.py: what one command compares."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import compare, headline
from fp8_megatron.config.checks import check_config
from fp8_megatron.config.io import parse_config

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("gpus", "model", "batch"), [(1, "gpt_345m", 32), (4, "gpt_7b", 64)])
def test_the_work_fits_the_machine(
    gpus: int, model: str, batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(compare, "_cannot_run", lambda *_: None)
    args = compare._parse(headline.comparison_flags(["--output-dir", str(tmp_path)], gpus))
    assert args.runs == headline.RUNS and args.nproc_per_node == gpus and args.output_dir == tmp_path
    for name in args.runs:
        flags = compare._flags(args, name) if name in compare.RUNS else compare._work_flags(args)
        assert flags[:2] == ["--config", f"configs/{model}.yaml"]
        config = parse_config(flags)
        check_config(config, gpus)
        assert config.global_batch_size(gpus) == batch and config.data.mock_data


@pytest.mark.parametrize(("asked", "there"), [("1", 0), ("5", 4)])
def test_gpus_that_are_not_there(asked: str, there: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        headline.comparison_flags(["--gpus", asked], there)
    assert f"--gpus {asked}: this machine has {there} GPUs" in capsys.readouterr().err
