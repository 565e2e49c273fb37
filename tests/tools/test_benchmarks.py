"""Programs of benchmarks/ and tools/ that measure: what they compare, their command lines, and short runs."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import any_model, chaos, compare, headline, measure, scaling
from benchmarks.measure import PARTS, Target, resolved
from benchmarks.scaling import Layout, plan, rows
from fp8_megatron.config.checks import check_config
from fp8_megatron.config.io import parse_config
from fp8_megatron.dtypes import E4M3, E5M2, GRAD_BLOCK
from fp8_megatron.errors import UserError
from fp8_megatron.formats.format import Quantized
from fp8_megatron.formats.tensorwise import Tensorwise
from fp8_megatron.moe.router_report import TOKENS_FILE
from fp8_megatron.quantization.weight_grad import WeightGrad
from tests.harness.token_files import write_token_files
from tools.gradient_snr import _EVERY, Sample
from tools.memory_at_peak import main, peak_table

# benchmarks/any_model.py: models of transformers under several runs


ROOT = Path(__file__).parents[2]


def results_of(folder: Path, *flags: str) -> list[any_model.Result]:
    """What the benchmark wrote for tiny models with these flags."""
    pytest.importorskip("transformers")
    output = folder / "any_model.json"
    command = [sys.executable, "benchmarks/any_model.py", "--tiny", "--steps", "1", *flags, "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(output.read_text())
    assert report["device"] == "cpu" and "transformers" in report["versions"]
    names = [result.pop("name") for result in report["results"]]
    results = [any_model.Result(**result) for result in report["results"]]
    assert [result.name for result in results] == names
    return results


def test_what_is_measured() -> None:
    """The strongest rivals are compiled whatever --runs says, unless others are named; recorded ones stand alone."""
    usual = any_model.cases(any_model.parse(["--runs", "O1"]))
    assert usual == [("O1", False, False), *((run, True, False) for run in ("bf16-amp", "torchao-tensorwise", "O2"))]
    named = any_model.parse("--runs --compiled-runs O3 --recorded-runs O2".split())
    assert any_model.cases(named) == [("O3", True, False), ("O2", False, True)]
    with pytest.raises(SystemExit):
        any_model.parse(["--runs", "--compiled-runs"])


def test_speed_is_quoted_beside_the_fastest_of_the_others() -> None:
    """Here torchao compiled, whose step is shorter than compiled BF16's; without compiled BF16 nothing is quoted."""
    eager = any_model.Result("m", "bf16-amp", False, step_ms=200.0, peak_gb=40.0, losses=[1.0])
    compiled = any_model.Result("m", "bf16-amp", True, step_ms=120.0, peak_gb=30.0, losses=[1.0])
    torchao = any_model.Result("m", "torchao-tensorwise", True, step_ms=110.0, peak_gb=28.0, losses=[1.0])
    ours = any_model.Result("m", "O2", True, step_ms=100.0, peak_gb=14.0, losses=[1.0])
    failed = any_model.Result("m", "te-delayed", False, error="RuntimeError: no")
    *_, row = any_model.markdown([eager, compiled, torchao, failed, ours]).splitlines()
    assert row == "| m | 200.0, 40.00 | 120.0, 30.00 | 110.0, 28.00 |  |  | 100.0, 14.00 | 1.10 × | 0.50 × |"
    *_, row = any_model.markdown([eager, torchao, ours]).splitlines()
    assert row.endswith("| 100.0, 14.00 |  |  |")
    assert any_model.table([eager, compiled, torchao, failed, ours]).row_count == 5


def test_documented_commands_are_taken() -> None:
    text = (ROOT / "docs" / "evidence.md").read_text().replace("\\\n", " ")
    commands = re.findall(r"^python benchmarks/any_model.py (.*)", text, re.MULTILINE)
    assert commands and all(any_model.cases(any_model.parse(shlex.split(words))) for words in commands)


@pytest.mark.slow
def test_runs_start_from_the_same_weights(tmp_path: Path) -> None:
    flags = ("--models", "bert-large", "--runs", "bf16-amp", "O2", "--compiled-runs", "--recorded-runs", "O2")
    amp, o2, recorded = results_of(tmp_path, *flags)
    assert (amp.model, amp.run, o2.run, o2.compiled) == ("bert-large", "bf16-amp", "O2", False)
    # log 256 = 5.55 at the start. FP8 moves the first loss by far less than other weights would.
    assert amp.losses[0] == pytest.approx(o2.losses[0], abs=0.02) and amp.losses[0] > 5.3
    assert recorded.recorded and not o2.recorded and recorded.losses == o2.losses
    assert amp.step_ms > 0 and o2.samples_per_second > 0


@pytest.mark.slow
@pytest.mark.parametrize("model", [name for name in any_model.WORKS if name not in ("bert-large", "te-gpt")])
def test_every_model_takes_fp8(model: str, tmp_path: Path) -> None:
    results = results_of(tmp_path, "--models", model, "--runs", "O3", "--compiled-runs")
    assert [(result.run, result.error) for result in results] == [("O3", None)]


# benchmarks/before_after.py: what it calls alike, and how it ends


PROGRAM = Path(__file__).parents[2] / "benchmarks" / "before_after.py"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("before_after", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "before_after", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _steps(loss: float) -> list[dict[str, Any]]:
    return [{"loss": loss, "grad_norm": 1.0, "step_seconds": 0.5, "peak_memory_gib": 2.0}] * 8


@pytest.mark.parametrize(("loss", "status"), [(3.0, 0), (3.0 + 2**-22, 1)])
def test_one_bit_of_one_loss_is_a_difference(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, loss: float, status: int
) -> None:
    steps = {"change": _steps(3.0), "base": _steps(loss)}

    def run_case(tree: Path, *unused: Any, **unused_kwargs: Any) -> list[dict[str, Any]]:
        return steps["change" if tree == program.ROOT else "base"]

    monkeypatch.setattr(program, "run_case", run_case)
    monkeypatch.setattr(sys, "argv", ["before_after.py", "--base", "HEAD", "--only", "fast"])
    assert program.main() == status


def test_an_unknown_case_is_refused(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["before_after.py", "--base", "HEAD", "--only", "fats"])
    with pytest.raises(SystemExit):
        program.main()
    assert "--only fats: --cases cpu has tensorwise, fast" in capsys.readouterr().err


@pytest.mark.slow
def test_a_tree_agrees_with_itself(program: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    case = next(case for case in program.CASES["cpu"] if case.name == "fast")
    row = program.compare_case(case, {"base": program.ROOT, "change": program.ROOT}, tmp_path, on_cpu=True)
    assert row.losses_alike and len(row.step_ms) == 2


# The chaos run: its draw and its bookkeeping, and (slow) a short one


@pytest.mark.slow
def test_a_short_chaos_run_ends_in_the_same_state(tmp_path: Path) -> None:
    output = tmp_path / "chaos.json"
    words = ["--ranks", "2", "--faults", "2", "--seed", "8", "--output", str(output), "--folder", str(tmp_path / "run")]
    status = chaos.main(words)
    result = json.loads(output.read_text())
    assert status == 0 and result["same_state_at_the_end"], result["problem"]
    assert len(result["faults"]) == 2


# The sample: every 97th gradient, as it was written and in blocks, against the exact product


@pytest.mark.parametrize(("share_of_amax", "saturates"), [(4.0, False), (0.5, True)])
def test_a_sample(share_of_amax: float, saturates: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    g, x = (torch.randn(64, 128, generator=generator) for _ in range(2))
    g_t, x_t = (
        Quantized(value.to(dtype), None, torch.ones(1), Tensorwise(dtype)) for value, dtype in ((g, E5M2), (x, E4M3))
    )
    grad = WeightGrad(g_t, x_t, torch.bfloat16)
    wide = grad.wide().float().view(-1)
    scale = share_of_amax * wide.abs().max() / 448
    payload = (wide / scale).clamp(-448, 448).to(E4M3)
    sample = Sample()
    for _ in range(2 * _EVERY):
        sample.take(grad, payload, scale.expand(wide.numel() // GRAD_BLOCK))
    summary = sample.summary()
    assert summary["gradients"] == 2
    assert 30.5 < summary["block_db"]["min"] < 32.5  # type: ignore[index]
    assert summary["gradients_that_saturate"] == (2 if saturates else 0)
    assert (summary["delayed_db"]["min"] > 30.5) == (not saturates)  # type: ignore[index]


# benchmarks/headline.py: what one command compares


@pytest.mark.parametrize(("gpus", "model", "batch"), [(1, "gpt_345m", 32), (4, "gpt_7b", 64)])
def test_the_work_fits_the_machine(
    gpus: int, model: str, batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(compare, "_cannot_run", lambda *_: None)
    args = compare.parse(headline.comparison_flags(["--output-dir", str(tmp_path)], gpus))
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


# benchmarks/host_overhead.py without a GPU: every operator's call runs with kernels that do nothing


def test_a_run_without_a_gpu(tmp_path: Path) -> None:
    """In a process of its own, because it replaces the operators."""
    output = tmp_path / "host_overhead.json"
    program = [sys.executable, "benchmarks/host_overhead.py", "--no-op", "--output", str(output)]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads(output.read_text())
    assert written["command"] == f"python benchmarks/host_overhead.py --no-op --output {output}"
    assert written["device"] == "no-op kernels" and "torch" in written["versions"]
    rows = {row["name"]: row for row in written["rows"]}
    assert rows.keys() >= {"quantize_with_scale", "quantize_grad_output", "scaled_mm_into_", "adamw_step_"}
    for name, row in rows.items():
        assert min(row["direct_us"], row["dispatched_us"]) > 0, name
        assert name in done.stdout


# benchmarks/measure.py: what its parts run is what the benchmarks and the configuration take


def commands_of(part: str, folder: Path, *, with_peer: bool = False) -> list[list[str]]:
    return [resolved(command) for command in PARTS[part].commands(Target(folder, with_peer))]


@pytest.mark.parametrize("part", list(PARTS))
def test_every_run_is_a_valid_configuration(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for command in commands_of(part, tmp_path):
        monkeypatch.setattr(sys, "argv", command[1:])
        if command[1] == "benchmarks/compare.py":
            args = compare.parse()
            assert args.nproc_per_node == PARTS[part].gpus
            for name in args.runs:
                check_config(parse_config(compare._flags(args, name)), args.nproc_per_node)
        elif command[1] == "benchmarks/scaling.py":
            assert max(scaling._parse().gpus) == PARTS[part].gpus


@pytest.mark.slow
def test_experts_over_four_ranks_are_compared_on_a_cpu(tmp_path: Path) -> None:
    """A command of the part `moe` with a tiny model and a file of tokens. megatron-core's experts need CUDA."""
    draw = np.random.default_rng(0)
    write_token_files(tmp_path / "text", [draw.integers(0, 255, 200).tolist() for _ in range(100)])
    tiny = "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --num-query-groups 4 --ffn-hidden-size 128 "
    tiny += f"--seq-length 32 --vocab-size 256 --data-path {tmp_path}/text --tokenizer-type NullTokenizer "
    tiny += "--num-workers 0 --split 1,0,0"
    folder = tmp_path / "mixtral-8x7b-2-tp2-ep2-micro2"
    commands = PARTS["moe"].commands(Target(tmp_path, with_peer=False, flags=tiny.split()))
    (command,) = (words for words in commands if str(folder) in words)
    done = subprocess.run(resolved(command), cwd=ROOT, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr
    fp8, bf16 = json.loads((folder / "comparison.json").read_text())["results"]
    assert (fp8["name"], bf16["name"]) == ("O3-default", "bf16")
    # The same tokens and initial weights; the bound is FP8's in tests/parallel/test_experts.py. Other tokens differ by
    # 10⁻².
    assert fp8["losses"][0] == pytest.approx(bf16["losses"][0], abs=3e-3)
    assert len(fp8["profiled_step_ms"]) == 4 and fp8["ms_by_kind_of_kernel"]
    loads = [json.loads(line) for line in (folder / "O3-default" / TOKENS_FILE).read_text().splitlines()]
    tokens = 2 * 2 * 32  # micro-batch × replicas × sequence, each with two experts
    assert len(loads) == len(fp8["losses"]) and {sum(layer) for layer in loads[-1]["tokens"]} == {2 * tokens}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "name a part: kernels, small,"),
        (["5b"], "there is no part '5b': choose of kernels, small,"),
        (["7b"], "part '7b' needs 4 GPUs, there are 0"),
        (["7b", "kernels", "--list", "--", "--seed", "1"], "--seed 1 are for comparisons, and 'kernels' has none;"),
    ],
)
def test_bad_input(
    flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure.torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(sys, "argv", ["measure.py", "--output-dir", str(tmp_path / "out"), *flags])
    with pytest.raises(SystemExit, match="2"):
        measure.main()
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# The peak is found, and what was freed before it or allocated after it does not count


def alloc(address: int, size: int, name: str) -> dict[str, Any]:
    frames = [
        {"filename": "/site/torch/x.py", "line": 1, "name": "empty"},
        {"filename": "/home/fp8_megatron/layers/linear.py", "line": 7, "name": name},
    ]
    return {"action": "alloc", "addr": address, "size": size, "frames": frames}


def free(address: int) -> dict[str, Any]:
    return {"action": "free_completed", "addr": address, "size": 0, "frames": []}


def test_what_is_alive_at_the_peak() -> None:
    history = [
        alloc(1, 1_000_000_000, "weights"),
        alloc(2, 3_000_000_000, "early"),
        free(2),
        alloc(3, 2_000_000_000, "activations"),
        alloc(2, 2_000_000_000, "activations"),  # the address once more
        {"action": "segment_alloc", "addr": 9, "size": 10**12, "frames": []},
        free(1),
        alloc(4, 500_000_000, "late"),
    ]
    lines = peak_table(history).splitlines()
    assert lines == [
        "    5.000 GB at the peak",
        "    4.000 GB in     2  linear.py:7 activations",
        "    1.000 GB in     1  linear.py:7 weights",
    ]


def test_without_a_gpu_nothing_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file would not be written."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words, problem in (([], "the first argument is the file"), (["memory.txt"], "torch finds no GPU here")):
        monkeypatch.setattr(sys, "argv", ["memory_at_peak.py", *(str(tmp_path / word) for word in words)])
        with pytest.raises(UserError, match=problem):
            main()
    assert not list(tmp_path.iterdir())


# benchmarks/scaling.py: what it runs, and what it makes of the figures


def test_plan() -> None:
    assert plan([4, 1, 2], [1, 2, 4], num_micro_batches=2) == [
        Layout("weak", 1, 1, 2),
        Layout("weak", 2, 1, 2),
        Layout("weak", 4, 1, 2),
        Layout("strong", 1, 1, 8),  # 8 micro-batches a step in all, as 4 GPUs have
        Layout("strong", 2, 1, 4),
        Layout("tp", 4, 2, 4),
        Layout("tp", 4, 4, 8),
    ]
    with pytest.raises(ValueError, match=r"3 does not divide the most GPUs \(4\)"):
        plan([3, 4], [], 1)


def result(name: str, speed: float) -> dict[str, Any]:
    return {"name": name, "tokens_per_second_per_gpu": speed, "step_ms": 1.0, "peak_gb": 2.0}


def test_efficiency_is_against_the_fewest_gpus_of_a_kind() -> None:
    layouts = plan([1, 2], [2], num_micro_batches=1)
    speeds = {"weak-1gpus": 100.0, "weak-2gpus": 90.0, "strong-1gpus": 120.0, "tp-2gpus-tp2": 45.0}
    table = rows({layout: [result("O3", speeds[layout.name])] for layout in layouts})
    assert [(row["kind"], row["gpus"], row["efficiency"]) for row in table] == [
        ("weak", 1, 1.0),
        ("weak", 2, 0.9),
        ("strong", 1, 1.0),
        ("strong", 2, 0.75),  # the most GPUs are a point of both
        ("tp", 2, 0.5),
    ]


def test_bad_numbers_are_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", "7b", "--gpus", "2", "3", "--output-dir", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["scaling.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        scaling.main()
    assert "2 does not divide the most GPUs (3)" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
