import json
import math

import pytest
import torch
from rich.console import Console

from fp8_megatron.formats import E4M3
from fp8_megatron.kernels.quantize import blockwise
from fp8_megatron.quantization.stats import snr_db
from tools import compare_optimizers, optimizer_settings
from tools.compare_optimizers import LINEAR, MATRIX, Run, initial_values, print_table, summary
from tools.optimizer_settings import CHUNK, EMULATED, SETTINGS, Setting, Space


def stepped(setting: Setting, shapes: dict, num_steps: int = 20) -> torch.Tensor:
    """The masters after a few steps on random gradients."""
    space = Space(shapes, initial_values(1, setting.perturbation), setting, is_linear=shapes is LINEAR)
    n = space.master_value().numel()
    for step in range(1, num_steps + 1):
        grad = 1e-3 * torch.randn(n, generator=torch.Generator().manual_seed(step))
        space.step(space.stored_grad(grad), torch.ones(1), step, 1e-3)
    assert torch.isfinite(space.compute_value()).all()
    return space.master_value()


@pytest.mark.parametrize(
    "shapes",
    [pytest.param(LINEAR, id="linear", marks=pytest.mark.slow), pytest.param(MATRIX, id="matrix")],
)
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: f"{setting.group}: {setting.name}")
def test_every_setting_steps_towards_where_fp32_does(setting: Setting, shapes: dict) -> None:
    """20 steps of 1e-3 beside weights of 0.1: even an FP8 master, which hardly moves, is within E4M3's rounding."""
    exact = stepped(Setting("", "", beta2=setting.beta2), shapes)
    measured = snr_db(stepped(setting, shapes), exact)
    if setting.is_exact:
        assert measured == math.inf
    elif setting.exp_avg_sq != "uint8 linear":  # whose second moments of 0 make updates explode
        assert 15.0 < measured < math.inf


def test_fp8_settings_compute_with_fp8_weights_and_bf16_embeddings() -> None:
    values = initial_values(1, 0.0)
    for name in ("O3", "stretch: split, int8, uint8"):
        setting = next(setting for setting in SETTINGS if setting.name == name)
        linear = Space(LINEAR, values, setting, is_linear=True)
        grad, scales = linear.stored_grad(torch.ones(linear.master_value().numel()))
        assert grad.dtype == E4M3 and scales is not None
        for place in linear.tensors.values():
            assert linear.compute_value()[place].unique().numel() <= 253  # E4M3's finite numbers
        matrix = Space(MATRIX, values, setting, is_linear=False)
        weights = matrix.compute_value()
        assert torch.equal(weights, weights.bfloat16().float()) and weights.unique().numel() > 253


def test_emulated_storages() -> None:
    x = torch.rand(2 * CHUNK, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 1e-6]).repeat_interleave(
        CHUNK
    )
    # One scale a tensor: the small half is lost under the large one's scale, and kept when it is a tensor of its own.
    together = EMULATED["fp8 tensor"](x)
    assert snr_db(together[:CHUNK], x[:CHUNK]) > 28.0 and not together[CHUNK:].any()
    state = optimizer_settings.State(x, "fp8 tensor", {"a": slice(0, CHUNK), "b": slice(CHUNK, 2 * CHUNK)})
    assert snr_db(state.load()[CHUNK:], x[CHUNK:]) > 28.0
    # 255 even steps of each block: an error of a step / √12 beside a root mean square of 1/√3.
    assert snr_db(EMULATED["uint8 linear"](x)[:CHUNK], x[:CHUNK]) == pytest.approx(20 * math.log10(2 * 255), abs=0.5)
    # The package's own encoding, without the noise.
    payload, scales = torch.empty(x.numel(), dtype=torch.uint8), torch.empty(x.numel() // 256)
    blockwise.quantize_blockwise_(x, payload, scales)
    assert torch.equal(EMULATED["uint8 nearest"](x), blockwise.dequantize_blockwise(payload, scales))
    for name in EMULATED:
        if "linear" not in name and "tensor" not in name:
            assert snr_db(EMULATED[name](x), x) > 24.0, name


def test_summary_and_table() -> None:
    exact, other, bad = SETTINGS[0], SETTINGS[2], SETTINGS[3]
    runs = {
        exact: [Run(1, 2.0, 3.0), Run(2, 2.5, 3.5)],
        other: [Run(1, 2.1, 3.0, parameter_snr_db={5: 30.0}), Run(2, 2.8, 3.5, parameter_snr_db={5: 40.0})],
        bad: [Run(1, diverged_at=3), Run(2, 2.0, 3.0)],
    }
    rows = summary(list(runs.items()))
    assert rows[1]["train_loss_gap"] == pytest.approx(0.2)
    assert rows[1]["train_loss_gap_std"] == pytest.approx(0.2 / math.sqrt(2))  # of 0.1 and 0.3
    assert rows[1]["validation_loss_gap"] == 0.0 and rows[1]["parameter_snr_db"] == {5: 35.0}
    assert "train_loss" not in rows[2]
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_table(rows, console)
    text = console.export_text()
    assert "+0.2000 ± 0.1414" in text and "35.0" in text and "not finite at step [3, None]" in text


def test_a_run_writes_its_json(tmp_path, monkeypatch) -> None:
    settings = (SETTINGS[0], Setting("m int8", "first moment", exp_avg="int8"))
    monkeypatch.setattr(compare_optimizers, "SETTINGS", settings)
    output = tmp_path / "results" / "out.json"
    assert compare_optimizers.main(["--output", str(output), "--steps", "3", "--seeds", "1"]) == 0
    report = json.loads(output.read_text(encoding="utf-8"))
    assert report["command"] == f"python -m tools.compare_optimizers --output {output} --steps 3 --seeds 1"
    assert report["versions"]["torch"] == torch.__version__ and report["num_params"] == 108544
    exact, int8 = report["results"]
    assert exact["train_loss_gap"] == 0.0 and exact["parameter_snr_db"] == {}
    assert 4.0 < int8["train_loss"] < 5.5 and 40.0 < int8["parameter_snr_db"]["3"] < 150.0
    assert int8["exp_avg"] == "int8" and len(int8["runs"]) == 1


@pytest.mark.parametrize(("group", "num_exact"), [("decoupling", 1), ("β₂ = 0.999", 1)])
def test_a_group_runs_with_fp32_adamw_of_its_own_beta(monkeypatch, group: str, num_exact: int) -> None:
    asked: list[Setting] = []

    def compared(settings, *others):
        asked.extend(settings)
        return [(setting, [Run(1, 2.0, 3.0)]) for setting in settings]

    monkeypatch.setattr(compare_optimizers, "compare", compared)
    assert compare_optimizers.main(["--groups", group]) == 0
    exact = [setting for setting in asked if setting.is_exact]
    assert len(exact) == num_exact and asked[0] is exact[0]
    assert {setting.group for setting in asked if not setting.is_exact} == {group} and len(asked) > 7
