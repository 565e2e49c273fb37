"""benchmarks/measure.py: what its parts run is what the benchmarks and the configuration take."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import compare, measure, scaling
from benchmarks.measure import PARTS, Target, resolved
from fp8_megatron.config.checks import check_config
from fp8_megatron.config.io import parse_config

ROOT = Path(__file__).parents[2]


def commands_of(part: str, folder: Path, *, with_peer: bool = False) -> list[list[str]]:
    return [resolved(command) for command in PARTS[part].commands(Target(folder, with_peer))]


@pytest.mark.parametrize("part", list(PARTS))
def test_every_run_is_a_valid_configuration(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for command in commands_of(part, tmp_path):
        monkeypatch.setattr(sys, "argv", command[1:])
        if command[1] == "benchmarks/compare.py":
            args = compare._parse()
            assert args.nproc_per_node == PARTS[part].gpus
            for name in args.runs:
                check_config(parse_config(compare._flags(args, name)), args.nproc_per_node)
        elif command[1] == "benchmarks/scaling.py":
            assert max(scaling._parse().gpus) == PARTS[part].gpus


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "name a part: kernels, small,"),
        (["5b"], "there is no part '5b': choose of kernels, small,"),
        (["7b"], "part '7b' needs 4 GPUs, there are 0"),
    ],
)
def test_bad_input(
    flags: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(measure.torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(sys, "argv", ["measure.py", *flags, "--output-dir", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="2"):
        measure.main()
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
