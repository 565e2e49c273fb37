"""Loss curves: what is read, how it is smoothed, and the figures and errors that come out."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from fp8_megatron.reporting import plot
from fp8_megatron.reporting.metrics_file import json_line
from fp8_megatron.reporting.plot import compare_losses, plot_losses, read_losses


def write_run(folder: Path, losses: list[float] | np.ndarray, *, tokens_per_step: int = 1_000_000) -> Path:
    folder.mkdir(parents=True)
    path = folder / "metrics.jsonl"
    with path.open("w") as stream:
        for i, loss in enumerate(losses, start=1):
            step = {"kind": "train", "iteration": i, "loss": float(loss), "consumed_tokens": i * tokens_per_step}
            stream.write(json_line(step))
            if i % 20 == 0:
                stream.write(json_line({"kind": "eval", "iteration": i, "split": "valid", "loss": float(loss) + 0.1}))
                stream.write(json_line({"kind": "eval", "iteration": i, "split": "test", "loss": 99.0}))
    return path


def falling_losses(num_steps: int, *, seed: int = 0) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(scale=0.05, size=num_steps)
    return 3.0 + 7.0 * np.exp(-np.arange(num_steps) / (0.2 * num_steps)) + noise


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Figures as they are saved, to look into."""
    figures: list[Figure] = []
    save = plot.save_figure
    monkeypatch.setattr(plot, "save_figure", lambda figure, path: (figures.append(figure), save(figure, path)))
    return figures


@pytest.fixture
def tool() -> ModuleType:
    path = Path(__file__).parents[2] / "tools" / "plot_losses.py"
    spec = importlib.util.spec_from_file_location("plot_losses_tool", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_read_keeps_gaps_and_leaves_the_test_split_out(tmp_path: Path) -> None:
    losses = falling_losses(40)
    losses[4] = np.nan
    curves = read_losses(write_run(tmp_path / "run", losses))
    np.testing.assert_array_equal(curves.losses, losses)
    ((name, evals),) = curves.evals.items()
    assert name == "validation"
    np.testing.assert_array_equal(evals.iterations, [20, 40])
    np.testing.assert_allclose(evals.losses, losses[[19, 39]] + 0.1)


def test_plot_shows_train_validation_tokens_and_non_finite_steps(tmp_path: Path, saved: list[Figure]) -> None:
    losses = falling_losses(100)
    losses[49] = np.inf
    output = tmp_path / "out" / "loss.png"
    plot_losses(write_run(tmp_path / "run", losses), output, title="a run")
    (axes,) = saved[0].axes
    lines = {line.get_label(): line for line in axes.lines}
    assert set(lines) == {"train, every step", "train, smoothed", "validation", "not finite (1 step)"}
    np.testing.assert_array_equal(lines["validation"].get_xdata(), [20, 40, 60, 80, 100])
    np.testing.assert_array_equal(lines["not finite (1 step)"].get_xdata(), [50])
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("iteration", "loss (nats per token)")
    (tokens,) = axes.child_axes
    assert tokens.get_xlabel() == "million tokens"
    np.testing.assert_allclose(tokens.get_xlim(), axes.get_xlim())  # a million tokens a step
    image = imread(output)[..., :3]
    assert image.shape == (650, 1170, 3)
    assert image.std() > 0.05  # not a blank page


def test_each_of_several_validation_sets_has_its_points(tmp_path: Path, saved: list[Figure]) -> None:
    runs = {}
    for run, added in (("one", 0.0), ("two", 1.0)):
        runs[run] = write_run(tmp_path / run, falling_losses(60) + added)
        text = runs[run].read_text().replace('"valid"', '"valid-wiki"')
        runs[run].write_text(text + text.replace("valid-wiki", "valid-code").replace('"test"', '"valid-$x$"'))
    plot_losses(runs["one"], tmp_path / "loss.png", title="a run")
    lines = {str(line.get_label()): line for line in saved[0].axes[0].lines}
    names = ["validation-wiki", "validation-code", r"validation-\$x\$"]
    assert [name for name in lines if name.startswith("validation")] == names
    assert len({(lines[name].get_color(), lines[name].get_marker()) for name in names}) == 3
    np.testing.assert_array_equal(lines["validation-code"].get_xdata(), [20, 40, 60])
    np.testing.assert_array_equal(lines[names[2]].get_ydata(), [99.0] * 3)

    compare_losses(runs, tmp_path / "compared.png")
    points = [line for line in saved[1].axes[0].lines if line.get_linestyle() == "None" and len(line.get_xdata())]
    assert len({(line.get_color(), line.get_marker()) for line in points}) == 6


def test_no_finite_loss_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", [np.nan, np.nan])
    with pytest.raises(ValueError, match=r"run/metrics.jsonl has no finite training loss.*2 training steps"):
        plot_losses(path, tmp_path / "loss.png", title="nothing")


def test_compare_draws_gaps_to_the_reference(tmp_path: Path, saved: list[Figure]) -> None:
    losses = falling_losses(100)
    runs = {
        "fp8": write_run(tmp_path / "fp8", losses + 0.02),
        "bf16": write_run(tmp_path / "bf16", losses),
        "short": write_run(tmp_path / "short", losses[:60] - 0.01),
    }
    compare_losses(runs, tmp_path / "compare.png", reference="bf16")
    top, bottom = saved[0].axes
    assert [line.get_label() for line in top.lines if line.get_label() in runs] == ["bf16", "fp8", "short"]
    gaps = {str(line.get_label()).split(":")[0]: line for line in bottom.lines}
    np.testing.assert_allclose(gaps["fp8"].get_ydata(), 0.02, atol=1e-9)
    np.testing.assert_allclose(gaps["short"].get_ydata(), -0.01, atol=1e-9)
    assert len(gaps["short"].get_xdata()) == 60
    assert gaps["fp8"].get_label() == "fp8: +0.0200 over the last tenth"
    assert bottom.get_ylabel().startswith("gap to bf16")


def test_tool_draws_one_run_and_several(tmp_path: Path, tool: ModuleType, saved: list[Figure]) -> None:
    runs = [str(write_run(tmp_path / name / "run", falling_losses(40, seed=i)).parent) for i, name in enumerate("ab")]
    output = str(tmp_path / "x.png")
    assert tool.main([runs[0], "--output", output]) == 0
    assert tool.main([*runs, "--output", output]) == 0
    assert [len(figure.axes) for figure in saved] == [1, 2]
    # Both folders are called "run", so the paths tell them apart; the first is the reference.
    assert saved[1].axes[1].get_ylabel() == f"gap to {runs[0]}\n(nats per token)"


def test_tool_says_what_is_missing(tmp_path: Path, tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main([str(tmp_path), "--output", str(tmp_path / "x.png")]) == 2
    assert f"no metrics.jsonl at {tmp_path}" in capsys.readouterr().err
    run = str(write_run(tmp_path / "run", [3.0, 2.0]).parent)
    assert tool.main([run, "--labels", "a", "b", "--output", str(tmp_path / "x.png")]) == 2
    assert "1 runs need as many different --labels, got ['a', 'b']" in capsys.readouterr().err


@pytest.mark.parametrize("tokens", [None, "1", True, 1.5, 0, 10**400])
def test_a_record_without_a_count_is_named(tmp_path: Path, tokens: object) -> None:
    path = write_run(tmp_path / "run", [3.0, 2.0])
    with path.open("a") as stream:
        stream.write(json.dumps({"kind": "train", "iteration": 3, "loss": 1.0, "consumed_tokens": tokens}) + "\n")
    message = re.escape(f"{path}: the row of iteration 3 has consumed_tokens({tokens!r}), not a count from 1")
    with pytest.raises(ValueError, match=message):
        read_losses(path)


def test_a_loss_beyond_any_axis_is_drawn_as_not_finite(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", [3.0, 1e308, -1e308, 2.0])
    assert np.isfinite(read_losses(path).losses).tolist() == [True, False, False, True]
    plot_losses(path, tmp_path / "loss.png", title=r"$\oops$ \udc80")
    assert (tmp_path / "loss.png").stat().st_size > 0


def test_tool_refuses_an_output_before_it_reads(
    tmp_path: Path, tool: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main([str(tmp_path / "absent"), "--output", str(tmp_path / "x.xyz")]) == 2
    assert "figures cannot be drawn as xyz; give one of ." in capsys.readouterr().err
    (tmp_path / "x.png").mkdir()
    assert tool.main([str(tmp_path / "absent"), "--output", str(tmp_path / "x")]) == 2
    assert f"--output {tmp_path}/x.png is a folder; give the path of a file" in capsys.readouterr().err
