"""The optimizer: every storage against FP32 AdamW over 100 steps, and its rules: skip, clip, decay, derive."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from fp8_megatron.config.schema import OptimizerConfig, PrecisionConfig
from fp8_megatron.dtypes import CHUNK, E4M3, StorageDtype
from fp8_megatron.kernels import reference
from fp8_megatron.optimizer import state as state_module
from fp8_megatron.optimizer.distributed_optimizer import FP8DistributedOptimizer
from fp8_megatron.planning.memory import model_storage, optimizer_settings
from fp8_megatron.quantization.scaled_tensor import ScaledTensor
from fp8_megatron.quantization.stats import snr_db
from fp8_megatron.sharding.data_parallel import DataParallelModule, finish_gradients
from tests.harness.tiny_gpt import tiny_optimizer

CPU = torch.device("cpu")
SHAPES = {"linear": (128, 64), "other_linear": (64, 64), "matrix": (96, 32), "vector": (96,)}
BF16 = PrecisionConfig(precision="bf16")
#: No clipping, no decay, so that a step is Adam's alone.
PLAIN = tiny_optimizer(lr=1e-2, weight_decay=0.0, clip_grad=0.0)


@dataclass
class Regression:
    """Four parameters, each pulled to a target through a random curvature: grad = (value − target) · curvature."""

    optimizer: FP8DistributedOptimizer
    params: dict[str, torch.nn.Parameter]
    model: DataParallelModule

    def values(self) -> dict[str, Tensor]:
        """The values that a forward pass computes with."""
        return {
            name: param.dequantize() if isinstance(param, ScaledTensor) else param.detach().float()
            for name, param in self.params.items()
        }

    def masters(self) -> dict[str, Tensor]:
        return {slot.name: state.get_master(slot).clone() for state, slot in self.optimizer.slots()}

    def step(self, grads: dict[str, Tensor]) -> float:
        self.model.reset()
        for name, grad in grads.items():
            self.params[name].main_grad.accumulate_(grad)  # type: ignore[attr-defined]
        finish_gradients([self.model])
        return self.optimizer.step().item()

    def state_bytes(self) -> dict[str, bytes]:
        """Every byte of weights, masters, moments and their scales, and the step count."""
        tensors = {"step": self.optimizer.step_count}
        for index, state in enumerate(self.optimizer.states):
            for kind, stored in {**state.states, "master": state.master, "weight": state.weight}.items():
                tensors[f"{index}.{kind}"] = stored.payload
                if stored.scales is not None:
                    tensors[f"{index}.{kind}.scales"] = stored.scales
            if state.weight_scales is not None:
                tensors[f"{index}.weight_scales"] = state.weight_scales
        return {name: tensor.view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


def initial_values() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def make_regression(precision: PrecisionConfig, config: OptimizerConfig = PLAIN) -> Regression:
    values = initial_values()
    params = {
        name: torch.nn.Parameter(
            ScaledTensor.quantize(value)
            if "linear" in name and precision.precision == "fp8"
            else torch.zeros_like(value, dtype=torch.bfloat16)
        )
        for name, value in values.items()
    }
    module = torch.nn.Module()
    for name, param in params.items():
        module.register_parameter(name, param)
    storage = model_storage(precision, num_micro_batches=1)
    model = DataParallelModule(module, storage=storage)
    optimizer = FP8DistributedOptimizer([model], optimizer_settings(config), storage, world=None, device=CPU)
    optimizer.load_weights(values.items())
    return Regression(optimizer, params, model)


def gradients(step: int, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Exact gradients at `values`, with noise of their own size that depends on the step only."""
    fixed = torch.Generator().manual_seed(2)
    noise = torch.Generator().manual_seed(100 + step)
    grads = {}
    for name, shape in SHAPES.items():
        target = 2.0 * torch.randn(shape, generator=fixed)
        curvature = 10.0 ** (2 * torch.rand(shape, generator=fixed) - 4)  # 10⁻⁴ … 10⁻²
        grads[name] = (values[name] - target + torch.randn(shape, generator=noise)) * curvature
    return grads


def reference_run(
    num_steps: int, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW, weight_decay: float = 0.0
) -> dict[str, Tensor]:
    """The same regression under torch's optimizer in FP32."""
    values = initial_values()
    params = {name: torch.nn.Parameter(value) for name, value in values.items()}
    groups = [
        {"params": [param], "weight_decay": 0.0 if param.ndim == 1 else weight_decay} for param in params.values()
    ]
    torch_optimizer = optimizer(groups, lr=PLAIN.lr, betas=(PLAIN.adam_beta1, PLAIN.adam_beta2), eps=PLAIN.adam_eps)  # type: ignore[call-arg]
    for step in range(num_steps):
        grads = gradients(step, {name: param.detach() for name, param in params.items()})
        for name, param in params.items():
            param.grad = grads[name]
        torch_optimizer.step()
    return {name: param.detach() for name, param in params.items()}


def fp8(**overrides: object) -> PrecisionConfig:
    return PrecisionConfig(precision="fp8", **overrides)  # type: ignore[arg-type]


F = StorageDtype
#: Storage and the least SNR of the linear weights' movement over 100 steps, against FP32 AdamW.
#:
#: FP8 gradients (31.5 dB each) are independent over the steps: 100 of them leave 31.5 + 20 dB. A master in FP16 moves
#: by about 1 in 100 steps of 0.01 and is rounded by up to 2⁻¹¹ at each: 20·log10(1 / (10 · 2⁻¹¹/√3)) = 51 dB. Together
#: 48.2 dB, less 2. An FP8 first moment is felt for 1/(1 − beta1) = 10 steps after each rounding: 10 · √100 roundings
#: against 100 updates leave a single rounding's 31.5 dB, less 1.5. A BF16 master's steps near 1, 2⁻⁷, are the size of
#: an update: it follows, no more. The bf16 level's gradients are taken at weights rounded by 55.6 dB.
STORAGES = {
    "bf16": (BF16, 55.0),
    "O1": (fp8(opt_level="O1"), 46.0),
    "O2": (fp8(opt_level="O2"), 30.0),
    "O3": (fp8(opt_level="O3"), 30.0),
    "weights_fp16": (fp8(params_dtype=F.FP16, main_params_dtype=F.FP32), 30.0),
    "weights_bf16": (fp8(params_dtype=F.BF16, main_params_dtype=F.FP32), 30.0),
    "weights_bf16_without_master": (fp8(opt_level="O1", params_dtype=F.BF16), 15.0),
    "master_fp32": (fp8(main_params_dtype=F.FP32), 30.0),
    "master_fp32_over_O1": (fp8(opt_level="O1", main_params_dtype=F.FP32), 46.0),
    "master_bf16": (fp8(main_params_dtype=F.BF16), 15.0),
    "exp_avg_fp32": (fp8(exp_avg_dtype=F.FP32), 43.0),  # O1 with FP8 weights: gradients taken 31.5 dB beside
    "exp_avg_bf16": (fp8(exp_avg_dtype=F.BF16), 43.0),
    "exp_avg_fp16": (fp8(exp_avg_dtype=F.FP16), 43.0),
    "exp_avg_sq_fp32": (fp8(exp_avg_sq_dtype=F.FP32), 30.0),
    "exp_avg_sq_bf16": (fp8(exp_avg_sq_dtype=F.BF16), 30.0),
    "exp_avg_sq_fp8": (fp8(exp_avg_sq_dtype=F.FP8), 24.0),
    # Stochastic rounding has twice the power of rounding to nearest, 31.5 − 3 dB, and the second moment scatters too.
    "companded": (fp8(exp_avg_dtype=F.INT8, exp_avg_sq_dtype=F.UINT8), 26.0),
    "stretch": (fp8(main_params_dtype=F.SPLIT, exp_avg_dtype=F.INT8, exp_avg_sq_dtype=F.UINT8), 26.0),
    "master_split": (fp8(main_params_dtype=F.SPLIT), 30.0),
    "grads_fp32": (fp8(main_grads_dtype=F.FP32), 30.0),
    "grads_bf16": (fp8(main_grads_dtype=F.BF16), 30.0),
}


@pytest.fixture(scope="module")
def fp32_run() -> dict[str, Tensor]:
    """FP32 AdamW's movement in 100 steps."""
    return {name: value - initial_values()[name] for name, value in reference_run(100).items()}


def movement(precision: PrecisionConfig) -> dict[str, Tensor]:
    regression = make_regression(precision)
    start = regression.masters()
    for step in range(100):
        regression.step(gradients(step, regression.values()))
    return {name: value - start[name] for name, value in regression.masters().items()}


@pytest.mark.parametrize("storage", list(STORAGES))
def test_trains_as_fp32_adamw_does(fp32_run: dict[str, Tensor], storage: str) -> None:
    precision, least_db = STORAGES[storage]
    moved = movement(precision)
    for name in ("linear", "other_linear"):
        assert snr_db(moved[name], fp32_run[name]) > least_db, name
    assert snr_db(moved["matrix"], fp32_run["matrix"]) > min(least_db, 30.0)
    assert snr_db(moved["vector"], fp32_run["vector"]) > 55.0  # FP32 state at every level


@pytest.mark.parametrize(
    ("name", "decoupled", "reference_kind"),
    [("adam", True, torch.optim.AdamW), ("adamw", True, torch.optim.AdamW), ("adam", False, torch.optim.Adam)],
)
def test_decay_is_torchs_on_matrices_and_none_on_vectors(
    name: str, decoupled: bool, reference_kind: type[torch.optim.Optimizer]
) -> None:
    """Fed the same gradients, FP32 state is torch's to FP32 rounding: 20 steps of a few 2⁻²⁴, on a movement of 0.1."""
    config = replace(PLAIN, optimizer=name, decoupled_weight_decay=decoupled, weight_decay=0.3)  # type: ignore[arg-type]
    regression = make_regression(BF16, config)
    start = regression.masters()
    params = {name: torch.nn.Parameter(value) for name, value in initial_values().items()}
    torch_optimizer = reference_kind(
        [{"params": [p], "weight_decay": 0.0 if p.ndim == 1 else 0.3} for p in params.values()],
        lr=PLAIN.lr,
        betas=(PLAIN.adam_beta1, PLAIN.adam_beta2),
        eps=PLAIN.adam_eps,
    )  # type: ignore[call-arg]
    for step in range(20):
        grads = gradients(step, {name: param.detach() for name, param in params.items()})
        regression.step(grads)
        for name, param in params.items():
            param.grad = grads[name]
        torch_optimizer.step()
    for name, value in regression.masters().items():
        assert snr_db(value - start[name], params[name].detach() - start[name]) > 100.0, name


def test_takes_no_momentum() -> None:
    """Both betas 0: every element moves by the learning rate against its gradient's sign (FP32: a few 2⁻²⁴ of 4)."""
    regression = make_regression(BF16, replace(PLAIN, adam_beta1=0.0, adam_beta2=0.0))
    start = regression.masters()
    grads = {name: 1e6 * grad for name, grad in gradients(0, regression.values()).items()}  # eps is nothing beside them
    regression.step(grads)
    for name, value in regression.masters().items():
        torch.testing.assert_close(value, start[name] - PLAIN.lr * grads[name].sign(), rtol=0, atol=1e-5)


def test_zero_gradients_decay_matrices_only() -> None:
    regression = make_regression(BF16, replace(PLAIN, weight_decay=0.5))
    start = regression.masters()
    for _ in range(10):
        regression.step({name: torch.zeros(shape) for name, shape in SHAPES.items()})
    for name, value in regression.masters().items():
        factor = 1.0 if len(SHAPES[name]) == 1 else (1.0 - PLAIN.lr * 0.5) ** 10
        torch.testing.assert_close(value, start[name] * factor, rtol=10 * 2**-24, atol=0)


@pytest.mark.parametrize("level", ["bf16", "O1", "O2", "O3", "stretch"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", list(SHAPES))
def test_a_bad_gradient_changes_no_byte(level: str, bad: float, name: str) -> None:
    regression, twin = (make_regression(STORAGES[level][0], replace(PLAIN, clip_grad=1.0)) for _ in range(2))
    for step in range(2):
        grads = gradients(step, regression.values())
        regression.step(grads)
        twin.step(grads)
    before = regression.state_bytes()
    grads = gradients(2, regression.values())
    grads[name].view(-1)[-1] = bad
    assert not math.isfinite(regression.step(grads))
    assert regression.state_bytes() == before
    # And the next step is as if nothing had happened.
    grads = gradients(3, regression.values())
    regression.step(grads)
    twin.step(grads)
    assert regression.state_bytes() == twin.state_bytes() != before


@pytest.mark.parametrize("clip_grad", [0.0, 1.0, 1e6])
def test_clips_by_the_global_norm(clip_grad: float) -> None:
    regression = make_regression(BF16, replace(PLAIN, clip_grad=clip_grad))
    grads = {name: 100.0 * grad for name, grad in gradients(0, regression.values()).items()}
    norm = regression.step(grads)
    exact = math.sqrt(sum(grad.double().square().sum().item() for grad in grads.values()))
    assert norm == pytest.approx(exact, rel=1e-5)  # before clipping; FP32 sums of 10⁴ squares
    factor = clip_grad / exact if clip_grad == 1.0 else 1.0
    assert exact > 1.0
    for state, slot in regression.optimizer.slots():
        # Adam's update hides a gradient's size; its first moment shows it.
        exp_avg = slot.slice(state.states["exp_avg"].payload)
        expected = (1.0 - PLAIN.adam_beta1) * factor * grads[slot.name]
        torch.testing.assert_close(exp_avg, expected, rtol=2e-5, atol=0)


def test_fp8_weights_are_their_quantised_master() -> None:
    regression = make_regression(STORAGES["O3"][0])
    for step in range(4):
        for state, slot in regression.optimizer.slots():
            param, master = slot.param, state.get_master(slot)
            if not isinstance(param, ScaledTensor):
                assert torch.equal(param, master.bfloat16())
                continue
            assert torch.equal(param.scale, reference.amax(master) / 448.0)
            encoded = reference.encode(master, param.scale, E4M3)
            assert torch.equal(param.payload.view(torch.uint8), encoded.view(torch.uint8))
        regression.step(gradients(step, regression.values()))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_fp16_weights_are_their_own_master(level: str) -> None:
    regression = make_regression(STORAGES[level][0])
    regression.step(gradients(0, regression.values()))
    for name, master in regression.masters().items():
        param = regression.params[name]
        if isinstance(param, ScaledTensor):
            assert param.payload.dtype == torch.float16 and torch.equal(param.dequantize(), master)


@pytest.mark.parametrize("level", ["bf16", "O1", "O2", "O3", "stretch"])
def test_holds_the_bytes_that_its_level_says(level: str) -> None:
    precision = STORAGES[level][0]
    regression = make_regression(precision)
    for buffer, state in zip(regression.model.grad_buffers, regression.optimizer.states, strict=True):
        if "linear" not in state.space.slots[0].name:
            continue
        counts = state.byte_counts()
        scales = counts.pop("scales")
        formats = precision.formats
        kinds = [kind for kind in (formats.weight, formats.main_grad, formats.master_weight) if kind is not None]
        said = sum(kind.itemsize for kind in kinds) + sum(dtype.itemsize for dtype in state.rule.dtypes(formats))
        assert sum(counts.values()) + buffer.payload.nbytes == said * state.space.numel
        # 4/256 bytes for each of at most three scaled states, five words and more a chunk, and per-tensor words.
        assert scales <= state.space.numel * (3 * 4 / 256 + 6 * 4 / CHUNK) + 64


@pytest.mark.parametrize("level", ["bf16", "O1", "O3", "stretch"])
def test_load_weights_says_what_is_wrong(level: str) -> None:
    optimizer = make_regression(STORAGES[level][0]).optimizer
    values = initial_values()
    with pytest.raises(ValueError, match=r"linear: the model's shape is \(128, 64\), the value's \(64, 128\)"):
        optimizer.load_weights({**values, "linear": values["linear"].t()}.items())
    with pytest.raises(ValueError, match="no parameter 'stranger'"):
        optimizer.load_weights({**values, "stranger": torch.zeros(3)}.items())
    del values["matrix"], values["vector"]
    with pytest.raises(ValueError, match=r"no value for parameter 'matrix' \(2 missing\)"):
        optimizer.load_weights(values.items())


@pytest.mark.parametrize("level", ["bf16", "O1", "O3", "stretch"])
def test_weights_are_derived_piece_by_piece(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a large model's memory asks for changes no byte, of the first weights or of what a step makes of them."""
    states = []
    for piece in (1 << 26, CHUNK):
        monkeypatch.setattr(state_module, "_PIECE", piece)
        regression = make_regression(STORAGES[level][0])
        assert piece > CHUNK or any(len(list(state._pieces())) > 1 for state in regression.optimizer.states)
        before = regression.state_bytes()
        regression.step(gradients(0, regression.values()))
        states.append((before, regression.state_bytes()))
    assert states[0] == states[1]
