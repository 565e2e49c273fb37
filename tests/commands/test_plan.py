"""fp8-megatron plan: tables for a cluster, on a machine without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8_megatron.commands import plan

CONFIGS = Path(__file__).parents[2] / "configs"


def _rows(out: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines() if line[:1] == "│"]


def test_the_best_layouts_and_what_they_need(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--gpus 4 --gpu h200 --top 3 -- --config {CONFIGS}/gpt_7b.yaml {CONFIGS}/fast.yaml"
    assert plan.main(words.split()) == 0
    out = capsys.readouterr().out
    assert "Predicted for O3 on 4 GPUs, the fastest first" in out
    rows = _rows(out)
    assert len(rows) == 3 and rows[0][:3] == ["1", "1", "4"]
    for row in rows:
        step_ms, speed = (float(cell.replace(",", "")) for cell in row[-2:])
        assert speed == pytest.approx(64 * 2048 / 4 / step_ms * 1e3, rel=1e-3)
        assert 20 < float(row[-3]) < 0.9 * 141
    assert "wire buffers 0.59" in out and "a rank sends in a step: gradients" in out and "ms of a step: gemms" in out
    assert "never measured" not in out


def test_kinds_of_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    """H100 is the default: 80 GB, and longer steps."""
    run = f"-- --config {CONFIGS}/gpt_7b.yaml {CONFIGS}/fast.yaml --micro-batch-size 1 --global-batch-size 32"
    times = []
    for flags, said in (("", "80 GB; step times on H100"), ("--gpu h200", "141 GB; step times on H200")):
        assert plan.main(f"--gpus 8 --top 1 {flags} {run}".split()) == 0
        out = capsys.readouterr().out
        assert said in out
        times.append(float(_rows(out)[0][-2].replace(",", "")))
    assert 1.03 < times[0] / times[1] < 1.2
    assert plan.main(f"--gpus 8 --gpu h200 --memory-gb 60 --top 1 {run}".split()) == 0
    assert "60 GB; step times on H200" in capsys.readouterr().out


def test_ranks_are_built(capsys: pytest.CaptureFixture[str]) -> None:
    """The peak is the sum of its parts, and near the prediction."""
    run = "--num-layers 3 --pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 1 --global-batch-size 64"
    words = f"--gpus 4 --build --levels bf16 O3 -- --config {CONFIGS}/gpt_125m.yaml --micro-batch-size 4 {run}"
    assert plan.main(words.split()) == 0
    out = capsys.readouterr().out
    assert "as built, bf16: TP 1 × PP 2 × DP 2, micro-batch 4" in out and "as built, O3" in out
    assert [line.split(":")[0] for line in out.splitlines() if "a step of validation holds" in line] == ["bf16", "O3"]
    rows = [row for row in _rows(out) if row[0].isdigit()]
    assert [row[0] for row in rows] == ["0", "1"] * 2
    for row in rows:
        parts, (peak, predicted) = map(float, row[1:9]), map(float, row[9:11])
        assert sum(parts) == pytest.approx(peak, abs=0.05)
        assert peak == pytest.approx(predicted, rel=0.25)  # small layers: buffers and what a backward needs count more


def test_levels_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    """BF16 does not fit where O3 does; the 5-byte form needs less still; TE has no step times."""
    words = (
        f"--gpus 1 --memory-gb 60 --levels bf16 O3 5-byte te -- --config {CONFIGS}/gpt_7b.yaml --global-batch-size 4"
    )
    assert plan.main(words.split()) == 1
    out = capsys.readouterr().out
    assert "bf16: nothing fits into 90% of 60 GB on 1 GPUs" in out and "te: nothing fits" in out
    o3, five = out.index("Predicted for O3"), out.index("Predicted for 5-byte")
    smallest = [min(float(row[-3]) for row in _rows(part)) for part in (out[o3:five], out[five:])]
    assert smallest[0] > smallest[1]
    words = f"--gpus 8 --levels te -- --config {CONFIGS}/gpt_1.3b.yaml"
    assert plan.main(words.split()) == 0
    out = capsys.readouterr().out
    assert "no step times: no rates of te were measured" in out and _rows(out)[0][-2:] == ["-", "-"]
    assert "step times on" not in out


def test_a_host_that_may_be_too_slow_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Several nodes are not recorded, and GPT-1.3B's layers may be shorter than Python's launches. Those of GPT-125M
    have no time."""
    words = f"--gpus 16 -- --config {CONFIGS}/gpt_1.3b.yaml --micro-batch-size 2 --global-batch-size 32"
    assert plan.main(words.split()) == 0
    out = capsys.readouterr().out
    assert "more than one node" in out and "≥: Python launches these steps" in out and "≥" in out.split("the first")[0]
    words = f"--gpus 16 -- --config {CONFIGS}/gpt_125m.yaml --micro-batch-size 1 --global-batch-size 16"
    assert plan.main(words.split()) == 0
    out = capsys.readouterr().out
    assert "no step times: layers have under 1 TFLOP" in out and _rows(out)[0][-2:] == ["-", "-"]


def test_the_largest_models_by_level(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = tmp_path / "largest.png"
    assert plan.main(["--largest", "8", "32", "--output", str(image)]) == 0
    rows = _rows(capsys.readouterr().out)
    sizes = [[float(cell.split()[0]) for cell in row[1:]] for row in rows]
    assert [row[0] for row in rows] == ["8", "32"]
    assert all(bf16 < o3 < five for bf16, o3, five in sizes)
    assert all(small < large for small, large in zip(*sizes, strict=True))
    assert image.read_bytes().startswith(b"\x89PNG")
    assert plan.main("--largest 8 --memory-gb 0.1 --levels O3".split()) == 0
    assert "none" in capsys.readouterr().out
    assert plan.main("--largest 8 --levels O3 -- --recompute-activations --num-layers 4".split()) == 0
    out = capsys.readouterr().out
    assert "layers, batch and layout are varied, whatever the flags say; micro-batch 1, core_attn recomputed" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--gpus 0 --", "--gpus: 0 is out of range; give 1 to 100000"),
        ("--gpus 12 -- --config {}/gpt_7b.yaml", "--gpus 12 is not a multiple of --gpus-per-node 8; give whole nodes"),
        ("--gpus 8 --memory-gb 0 --", "--memory-gb: 0 is out of range; give more than 0"),
        ("--gpus 8 --levels O4 --", "invalid choice: 'O4'"),
        ("--gpus 8 --gpu a100 --", "invalid choice: 'a100'"),
        ("--gpus 1 --build --gpu h200 -- --config {}/gpt_7b.yaml", "--gpu: has no effect with --build"),
        ("--gpus 8 -- --num-layrs 3", "--num-layrs"),
        (
            "--gpus 8 -- --config {}/gpt_7b.yaml --skip-train --load x",
            "skip_train: layouts are planned for training; leave it out",
        ),
        ("--gpus 8 -- --config {}/gpt_7b.yaml --dry-run", "dry_run: layouts are planned for training; leave it out"),
        ("--gpus 8 --largest 8", "not allowed with argument --gpus"),
        ("--gpus 8 --output a.png -- --config {}/gpt_7b.yaml", "--output is for --largest; drop it"),
        (
            "--largest 8 -- --num-virtual-stages-per-pipeline-rank 2",
            "--num-virtual-stages-per-pipeline-rank 2: --largest varies pipeline stages and batches; drop it",
        ),
        ("--largest 8 -- --train-samples 9 --rampup-batch-size 8 8 9", "--rampup-batch-size 8 8 9: --largest varies"),
        ("--largest 8 --build", "--build is for --gpus; drop it"),
        ("--gpus 4 --build --levels te -- --config {}/gpt_7b.yaml", "Transformer Engine's layers, which need a GPU"),
        ("--largest 8 --top 2 --network-gb 9", "--network-gb --top: has no effect with --largest; drop it"),
        ("--gpus 1 --longest --top 3 -- --config {}/gpt_7b.yaml", "--top: has no effect with --longest; drop it"),
        ("--gpus 1 --build --memory-gb 40 -- --config {}/gpt_7b.yaml", "--memory-gb: has no effect with --build"),
        ("--largest 8 --output a.doc", "figures cannot be drawn as doc"),
        ("--gpus 8", "not given: --num-layers"),
        ("--gpus 8 --config {}/gpt_7b.yaml", "unknown flag --config; put flags of the run behind --"),
    ],
)
def test_mistakes_are_one_line(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = plan.main(words.format(CONFIGS).split())
    except SystemExit as exit_info:
        status = exit_info.code  # type: ignore[assignment]
    captured = capsys.readouterr()
    assert status == 2 and said in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_the_longest_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    run = f"--longest -- --config {CONFIGS}/llama_8b.yaml --global-batch-size 1"
    assert plan.main(f"--gpus 1 --memory-gb 141 {run}".split()) == 0
    out = capsys.readouterr().out
    rows = _rows(out)
    assert [row[:4] for row in rows[:3]] == [
        ["nothing", *form] for form in (("no", "no", "no"), ("yes", "no", "no"), ("yes", "no", "yes"))
    ]
    lengths = [int(row[4].replace(",", "")) for row in rows]
    assert len(lengths) == 13 and lengths[0] == min(lengths) and lengths[-1] == max(lengths)
    assert "--loss-chunk-size 8192" in out
    assert plan.main(f"--gpus 1 --memory-gb 24 {run}".split()) == 1
    assert "none" in capsys.readouterr().out


@pytest.mark.parametrize("others", ["--build", "--levels O3 bf16"])
def test_the_longest_sequence_is_one_question(capsys: pytest.CaptureFixture[str], others: str) -> None:
    with pytest.raises(SystemExit):
        plan.main(f"--gpus 1 --longest {others} -- --config {CONFIGS}/llama_8b.yaml".split())
    assert "--longest is for" in capsys.readouterr().err


def test_host_memory_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--gpus 1 --memory-gb 141 --top 1 -- --config {CONFIGS}/llama_8b.yaml --cpu-offloading-num-layers 31"
    assert plan.main(words.split()) == 0
    out = capsys.readouterr().out
    assert "GB on the host for a rank's activations: " in out and "copies to the host, which count as hidden" in out


def test_what_the_layout_of_the_flags_does_not_read_counts_in_others(capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks that share experts overlap their exchanges, which is for one stage and without full recomputation."""
    run = f"--config {CONFIGS}/qwen3_30b_a3b.yaml --overlap-moe-expert-parallel-comm"
    assert plan.main(f"--gpus 8 --top 99 -- {run}".split()) == 0
    rows = _rows(capsys.readouterr().out)
    shared = {(row[1], row[6]) for row in rows if int(row[3]) > 1}
    assert shared == {("1", "none"), ("1", "moe")}
    assert ("2", "full") in {(row[1], row[6]) for row in rows if row[0] == row[3] == "1"}
