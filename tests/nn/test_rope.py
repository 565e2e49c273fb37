"""The angles of RoPE, and query and key of a 16-bit layer, against float64."""

from __future__ import annotations

import pytest
import torch
from megatron.core.models.common.embeddings import YarnRotaryEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor

from fp8_megatron.config.model import ModelConfig
from fp8_megatron.kernels.ops import Rotation
from fp8_megatron.mcore.runtime import runtime
from fp8_megatron.nn.rope import Yarn, cos_sin_table, rope_frequencies, split_rotated

SEQ, BATCH, GROUPS = 24, 3, 2


@pytest.mark.parametrize(("rotary_dim", "base"), [(128, 10000), (64, 500_000), (24, 10000)])
def test_the_table_holds_megatrons_angles(rotary_dim: int, base: int) -> None:
    """megatron-core computes them in FP32: an angle of up to 4096 rounds by 2⁻¹², and a frequency by 2⁻²⁴ of that."""
    theirs = RotaryEmbedding(rotary_dim, 1.0, rotary_base=base, use_cpu_initialization=True)
    frequencies = rope_frequencies(rotary_dim, base)
    torch.testing.assert_close(frequencies.float(), theirs.inv_freq, rtol=3e-7, atol=0)
    cos, sin = theirs.get_cos_sin(4096)
    table = cos_sin_table(frequencies, 4096)
    assert table.shape == (4096, 2, rotary_dim // 2) and table.is_contiguous()
    torch.testing.assert_close(table[:, 0], cos, rtol=0, atol=1e-3)
    torch.testing.assert_close(table[:, 1], sin, rtol=0, atol=1e-3)
    torch.testing.assert_close(table[:4, 1], sin[:4], rtol=0, atol=2e-6)


SCALINGS = {
    "llama3.1": ({"rope_type": "llama3", "factor": 8.0}, {"llama3_factor": 8.0}),
    "llama3.2": ({"rope_type": "llama3", "factor": 32.0}, {"llama3_factor": 32.0}),
    "linear": ({"rope_type": "linear", "factor": 4.0}, {"interpolation": 4.0}),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_frequencies_are_transformers_and_megatrons(name: str) -> None:
    """Both compute in FP32: some rounding errors of 2⁻²⁴ each."""
    transformers = pytest.importorskip("transformers", reason="frequencies are compared with transformers'")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theirs, ours = SCALINGS[name]
    frequencies = rope_frequencies(128, 500_000, **ours)
    llama3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    settings = transformers.LlamaConfig(
        hidden_size=1024,
        num_attention_heads=8,
        max_position_embeddings=131_072,
        rope_parameters={"rope_theta": 500_000.0, **theirs, **(llama3 if name.startswith("llama3") else {})},
    )
    inverse, factor = ROPE_INIT_FUNCTIONS[str(theirs["rope_type"])](settings, torch.device("cpu"))
    assert factor == 1.0
    torch.testing.assert_close(frequencies.float(), inverse, rtol=1e-6, atol=0)
    megatron = RotaryEmbedding(
        128,
        1.0,
        rotary_base=500_000,
        rope_scaling="llama3_factor" in ours,
        rope_scaling_factor=ours.get("llama3_factor", 8.0),
        seq_len_interpolation_factor=ours.get("interpolation"),  # type: ignore[arg-type]
        use_cpu_initialization=True,
    )
    expected = megatron.get_freqs_non_repeated(2)[1]
    torch.testing.assert_close(frequencies.float(), expected, rtol=1e-6, atol=0)
    plain = rope_frequencies(128, 500_000)
    assert (frequencies <= plain).all() and (frequencies < plain).sum() > 20


#: Qwen2.5's, gpt-oss's, DeepSeek's; one blended pair; blends that end at the first and at the last pair.
YARNS = {
    "qwen2.5": (128, 1_000_000, Yarn(4.0, 32768)),
    "gpt-oss": (64, 150_000, Yarn(32.0, 4096, rounds_range=False)),
    "deepseek": (64, 10_000, Yarn(40.0, 4096)),
    "one_pair": (32, 10_000, Yarn(2.0, 64, 10.0, 9.9, rounds_range=False)),
    "short": (32, 10_000, Yarn(8.0, 16)),
    "long": (16, 50, Yarn(8.0, 4096, 64.0, 2.0)),
}


@pytest.mark.parametrize("name", YARNS)
def test_yarn_is_megatrons_and_transformers(name: str) -> None:
    """Both compute in FP32: some rounding errors of 2⁻²⁴ each, and an angle of up to 512 rounds by 2⁻¹⁵."""
    width, base, yarn = YARNS[name]
    mscale_all_dim = 0.5 if name == "deepseek" else 0.0
    model = ModelConfig(
        position_embedding_type="yarn", rotary_scaling_factor=yarn.factor, mscale_all_dim=mscale_all_dim
    )
    frequencies = rope_frequencies(width, base, yarn=yarn)
    with runtime(torch.device("cpu")):
        megatron = YarnRotaryEmbedding(
            width,
            rotary_base=base,
            use_cpu_initialization=True,
            scaling_factor=yarn.factor,
            original_max_position_embeddings=yarn.original_context,
            beta_fast=yarn.beta_fast,
            beta_slow=yarn.beta_slow,
            mscale=model.mscale,
            mscale_all_dim=mscale_all_dim,
            correction_range_round_to_int=yarn.rounds_range,
        )
        angles, magnitude = megatron(512)
    assert model.rope_magnitude == pytest.approx(magnitude, rel=1e-12)
    torch.testing.assert_close(frequencies.float(), angles[1, 0, 0, : width // 2], rtol=1e-6, atol=0)
    table = cos_sin_table(frequencies, 512, model.rope_magnitude)
    expected = torch.stack([angles.cos(), angles.sin()]) * magnitude
    torch.testing.assert_close(table, expected[:, :, 0, 0, : width // 2].transpose(0, 1), rtol=0, atol=3e-4)
    transformers = pytest.importorskip("transformers", reason="frequencies are compared with transformers'")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    settings = transformers.LlamaConfig(
        hidden_size=4 * width,
        num_attention_heads=4,
        rope_parameters={
            "rope_theta": float(base),
            "rope_type": "yarn",
            "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_context,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "mscale": model.mscale,
            "mscale_all_dim": mscale_all_dim,
            "truncate": yarn.rounds_range,
        },
    )
    inverse, factor = ROPE_INIT_FUNCTIONS["yarn"](settings, torch.device("cpu"))
    assert model.rope_magnitude == pytest.approx(factor, rel=1e-12)
    torch.testing.assert_close(frequencies.float(), inverse, rtol=1e-6, atol=0)
    plain = rope_frequencies(width, base)
    assert (frequencies <= plain).all() and (frequencies < plain).any()


def exact(y: Tensor, rotation: Rotation) -> list[Tensor]:
    """Query, key and value of y [s, b, N] in float64; complex numbers turn the pairs."""
    angle = torch.complex(rotation.cos_sin[:, 0].double(), rotation.cos_sin[:, 1].double())[:, None, None, None]
    heads = y.view(SEQ, BATCH, GROUPS, -1, rotation.head_dim)

    def turned(part: Tensor) -> Tensor:
        if rotation.interleaved:
            pairs = torch.view_as_complex(part.unflatten(-1, (-1, 2)).contiguous())
            return torch.view_as_real(pairs * angle).flatten(-2).flatten(3)
        pairs = torch.complex(*part.chunk(2, dim=-1)) * angle
        return torch.cat([pairs.real, pairs.imag], dim=-1).flatten(3)

    return [turned(heads[..., :-2, :]), turned(heads[..., -2:-1, :]), heads[..., -1, :]]


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("widths", [(32, 16, 16), (16, 16, 16)], ids=["grouped", "single"])
@pytest.mark.parametrize("magnitude", [1.0, 1.3], ids=["", "longer"])
def test_split_rotated(interleaved: bool, widths: tuple[int, int, int], magnitude: float) -> None:
    """Values and gradients round to BF16 once: at most 2⁻⁸ of each."""
    generator = torch.Generator().manual_seed(1)
    rotation = Rotation(cos_sin_table(rope_frequencies(16, 100), SEQ, magnitude), 16, interleaved)
    x = torch.randn(SEQ, BATCH, GROUPS * sum(widths), generator=generator).bfloat16().requires_grad_()
    x64 = x.detach().double().requires_grad_()
    y = 1 * x  # fresh memory, as a GEMM's output
    parts = split_rotated(y, rotation, widths)
    expected = exact(x64, rotation)
    grads = [torch.randn(part.shape, generator=generator).bfloat16() for part in parts]
    torch.autograd.backward(parts, grads)
    torch.autograd.backward(expected, [grad.double() for grad in grads])
    assert x.grad is not None and x64.grad is not None
    for part, whole in [*zip(parts, expected, strict=True), (x.grad, x64.grad)]:
        assert part.shape == whole.shape
        torch.testing.assert_close(part.double(), whole, rtol=2.0**-8, atol=1e-6)
    memory = {part.untyped_storage().data_ptr() for part in parts}
    if widths[0] == 16:  # in place
        assert memory == {y.untyped_storage().data_ptr()}
    else:  # the projection's output is free once they are written
        assert y.untyped_storage().data_ptr() not in memory and len(memory) == 3
        assert all(part.is_contiguous() for part in parts)
