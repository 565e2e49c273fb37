"""muP: what it multiplies, sizes that do not grow with the width, layouts, resuming.

The reference are the rules of arXiv 2203.03466 (tables 3 and 8) as Megatron-LM 0.19 has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import optimizer as core_optimizer
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from torch import Tensor

from fp8_megatron.config.checks import ConfigError, check_config
from fp8_megatron.config.io import parse_config
from fp8_megatron.config.learning_rate import schedule_notes
from fp8_megatron.config.schema import Config, ParallelConfig, PrecisionConfig
from fp8_megatron.mcore.runtime import runtime
from fp8_megatron.mcore.topology import initialized, is_embedding_or_output
from fp8_megatron.mcore.transformer_config import transformer_config
from fp8_megatron.optimizer.state import SpaceState
from fp8_megatron.quantization.stats import snr_db
from fp8_megatron.sharding.partition import Fragment, Slot
from tests.harness.ranks import RankPool
from tests.harness.tiny_checkpoint import run_tiny_on_a_rank
from tests.harness.tiny_gpt import (
    GPT3_STYLE,
    LLAMA_STYLE,
    VOCAB_SIZE,
    TinyGPT,
    build_tiny_gpt,
    forward_backward,
    random_batches,
    tiny_config,
    tiny_optimizer,
    train_tiny_gpt,
)
from tests.parallel.layouts import LAYOUTS, assert_same_bits, run
from tests.parallel.test_context_parallel import gradients
from tests.parallel.test_experts import MODEL as EXPERTS

CPU = torch.device("cpu")
STYLES = {"gpt3": GPT3_STYLE, "llama": LLAMA_STYLE, "experts": EXPERTS}
PRECISIONS = {
    "bf16": PrecisionConfig(precision="bf16"),
    "tensorwise": PrecisionConfig(fp8_recipe="tensorwise"),
    "head": PrecisionConfig(fp8_lm_head=True),
    "16_bit_head": PrecisionConfig(fp8_lm_head=False),
}
#: Twice the width of the base, and every multiplier another number than 1.
TWICE = {"use_mup": True, "mup_base_hidden_size": 64, "mup_embedding_mult": 3.0, "mup_base_head_dim": 8.0}
#: One batch at each step.
BATCHES = random_batches(1, 2).expand(4, -1, -1, -1)


def with_gpt(config: Config, look: Callable[[TinyGPT, Config], Any]) -> Any:
    """What `look` finds in a model of one rank."""
    with runtime(CPU), initialized(config.parallel, config.model.num_layers, CPU) as topology:
        return look(build_tiny_gpt(config, topology, CPU, 1), config)


# What follows from the settings


@pytest.mark.parametrize(
    ("settings", "width", "scale", "embedding", "output"),
    [
        ({"mup_base_hidden_size": 64}, 1.0, 32**-0.5, 1.0, 1.0),  # without --use-mup, which is an error
        ({"use_mup": True}, 1.0, 1 / 32, 1.0, 1.0),
        ({"use_mup": True, "mup_attn_scale_power": 0.5}, 1.0, 32**-0.5, 1.0, 1.0),
        ({"use_mup": True, "mup_base_hidden_size": 32, "mup_base_head_dim": 16.0}, 4.0, 4 / 32, 1.0, 0.25),
        ({"use_mup": True, "mup_base_hidden_size": 32, "mup_output_mult": 2.0}, 4.0, 1 / 32, 1.0, 2.0),
        ({"use_mup": True, "mup_base_hidden_size": 256, "mup_embedding_mult": 5.0}, 0.5, 1 / 32, 5.0, 2.0),
    ],
)
def test_multipliers(settings: dict[str, Any], width: float, scale: float, embedding: float, output: float) -> None:
    model = replace(GPT3_STYLE, **settings)
    assert (model.width_mult, model.embedding_mult, model.output_mult) == (width, embedding, output)
    assert model.softmax_scale == pytest.approx(scale)


FLAGS = "--mock-data --vocab-size 64 --seq-length 128 --num-layers 2 --hidden-size 128 --num-attention-heads 4"


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--mup-base-hidden-size 64", "mup_base_hidden_size(64) has no effect without use_mup; drop it or give --use-"),
        ("--mup-width-mult 2", "mup_width_mult(2.0) has no effect without use_mup"),
        (
            "--use-mup --mup-width-mult 4",
            "mup_width_mult(4) is not hidden_size(128) / mup_base_hidden_size(None) = 1; drop it, or give "
            "--mup-base-hidden-size 32",
        ),
        ("--use-mup --mup-embedding-mult 0", "mup_embedding_mult(0.0)"),
        ("--use-mup --mup-attn-scale-power 5", "mup_attn_scale_power(5.0)"),
        ("--use-mup --mup-base-hidden-size 0", "mup_base_hidden_size(0)"),
    ],
)
def test_errors(flags: str, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_config(parse_config([*FLAGS.split(), *flags.split()]), 1)
    assert problem in str(error.value) and "\n" not in str(error.value)


def test_the_width_may_be_given_if_it_is_right() -> None:
    flags = "--use-mup --mup-width-mult 2 --mup-base-hidden-size 64 --optimizer muon"
    config = parse_config([*FLAGS.split(), *flags.split()])
    check_config(config, 1)
    (note,) = schedule_notes(config, 1)
    assert "muon_scale_mode(spectral) makes updates grow with the width" in note


def _masters(gpt: TinyGPT) -> dict[str, Tensor]:
    def load(state: SpaceState, slot: Slot, fragment: Fragment) -> Tensor:
        return state.part("master", slot, fragment).load()

    return {slot.name: state.space.assemble(slot, partial(load, state, slot)) for state, slot in gpt.optimizer.slots()}


def _standard_deviations(gpt: TinyGPT, config: Config) -> dict[str, float]:
    return {name: value.std().item() for name, value in _masters(gpt).items() if value.ndim > 1}


@pytest.mark.parametrize("style", STYLES)
def test_initial_weights(ranks: RankPool, style: str) -> None:
    """The same draws, times 1 / √m in layers, with m = 4; σ is 0.02, and 0.02 / √(2 · 2) of output projections."""
    model = replace(STYLES[style], use_mup=True, mup_base_hidden_size=32)
    found, plain = (
        ranks.run(with_gpt, tiny_config(own, precision=PRECISIONS["bf16"]), _standard_deviations, num_ranks=1)[0]
        for own in (model, STYLES[style])
    )
    of_ends = [name for name in found if "embedding" in name or name == "output_layer.weight"]
    assert len(of_ends) == 2 and len(found) >= 10
    for name, value in found.items():
        assert value == pytest.approx(plain[name] / (1.0 if name in of_ends else 2.0), rel=1e-5), name
        deep = 2.0 if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else 1.0
        assert plain[name] == pytest.approx(0.02 / deep, rel=0.25), name


def _rates(gpt: TinyGPT, config: Config) -> dict[str, tuple[float, float, float, bool]]:
    groups = zip(gpt.optimizer.states, gpt.optimizer.param_groups, strict=True)
    return {
        slot.name: (group["max_lr"], group["min_lr"], group.get("eps", 0.0), group["is_decoupled_lr"])
        for state, group in groups
        for slot in state.space.slots
    }


@pytest.mark.parametrize("precision", ["bf16", "tensorwise"])
@pytest.mark.parametrize("optimizer", ["adam", "lion", "sgd", "muon"])
@pytest.mark.parametrize("decoupled", [None, 3e-3])
def test_learning_rates(ranks: RankPool, optimizer: str, precision: str, decoupled: float | None) -> None:
    """m is 4. Adam, Lion: hidden matrices 1/m, Adam's ε too. SGD: all others m. Muon's matrices: as without muP."""
    settings: dict[str, Any] = {"lr": 1e-2, "min_lr": 1e-3, "adam_eps": 1e-8, "decoupled_lr": decoupled}
    config = tiny_config(
        replace(EXPERTS, use_mup=True, mup_base_hidden_size=32),
        precision=PRECISIONS[precision],
        optimizer=tiny_optimizer(optimizer=optimizer, **settings),
    )
    (found,) = ranks.run(with_gpt, config, _rates, num_ranks=1)
    for name, (peak, least, eps, is_decoupled) in found.items():
        is_end = name in ("embedding.word_embeddings.weight", "output_layer.weight")
        is_linear = name.endswith("weight") and ".linear_" in name
        is_matrix = is_linear or "router.weight" in name or "gate_weight" in name
        assert is_decoupled == (is_end and decoupled is not None), name
        factor = 1.0
        if optimizer in ("adam", "lion") or (optimizer == "muon" and not is_linear):
            factor = 1 / 4 if is_matrix else 1.0
        elif optimizer == "sgd":
            factor = 1.0 if is_matrix or is_decoupled else 4.0
        expected = decoupled if is_decoupled else 1e-2
        assert (peak, least) == pytest.approx((expected * factor, 1e-3 * factor)), name
        assert eps == pytest.approx(1e-8 * factor if optimizer in ("adam", "muon") else 0.0), name
    assert sum("router" in name for name in found) == 2 and len(found) > 15


# Sizes


def _sizes(gpt: TinyGPT, config: Config) -> dict[str, float]:
    """Root mean squares of what modules return in the sixth step on one batch."""
    found: dict[str, float] = {}

    def see(name: str, output: Any) -> None:
        values = output[0] if isinstance(output, tuple) else output
        found[name] = values.detach().float().square().mean().sqrt().item()

    model = gpt.chunks[0].module
    modules = {"embedding": model.embedding}
    for index, layer in enumerate(model.decoder.layers):
        modules |= {f"attention {index}": layer.self_attention, f"mlp {index}": layer.mlp, f"layer {index}": layer}
    for name, module in modules.items():
        module.register_forward_hook(lambda _, args, output, name=name: see(name, output))
    (batch,) = random_batches(1, 1)
    for _ in range(6):
        forward_backward(gpt, config, batch)
        gpt.optimizer.step()
    return found


WIDTHS = (32, 64, 256)
RATES = {"adam": 1e-2, "lion": 3e-3, "sgd": 0.1, "muon": 3e-2}


def sizes_by_width(
    ranks: RankPool, style: str, optimizer: str, precision: str, widths: Sequence[int], **settings: Any
) -> dict[str, list[float]]:
    """By module, the sizes at those widths. Heads have 16 columns."""
    found: dict[str, list[float]] = {}
    for width in widths:
        sizes: dict[str, Any] = {"hidden_size": width, "num_attention_heads": width // 16, "ffn_hidden_size": 4 * width}
        if style != "gpt3":
            sizes["num_query_groups"] = width // 16
        if style == "experts":
            sizes |= {"moe_ffn_hidden_size": 2 * width, "moe_shared_expert_intermediate_size": width, "num_experts": 4}
        model = replace(STYLES[style], init_method_std=0.1, **sizes, **settings)
        rules = tiny_optimizer(
            optimizer=optimizer,
            lr=RATES[optimizer],
            weight_decay=0.0,
            clip_grad=0.0,
            **({"muon_scale_mode": "unit_rms_norm"} if optimizer == "muon" else {}),
        )
        config = tiny_config(model, precision=PRECISIONS[precision], optimizer=rules)
        for name, size in ranks.run(with_gpt, config, _sizes, num_ranks=1)[0].items():
            found.setdefault(name, []).append(size)
    return found


@pytest.mark.parametrize(
    ("style", "optimizer", "precision"),
    [
        ("gpt3", "adam", "bf16"),
        ("llama", "adam", "head"),
        ("experts", "adam", "bf16"),
        ("gpt3", "lion", "bf16"),
        ("gpt3", "sgd", "bf16"),
        ("llama", "muon", "bf16"),
    ],
)
def test_sizes_do_not_grow_with_the_width(ranks: RankPool, style: str, optimizer: str, precision: str) -> None:
    settings: dict[str, Any] = {"use_mup": True, "mup_base_hidden_size": WIDTHS[0], "mup_base_head_dim": 16.0}
    mup = sizes_by_width(ranks, style, optimizer, precision, WIDTHS, **settings)
    plain = sizes_by_width(ranks, style, optimizer, precision, (WIDTHS[0], WIDTHS[-1]))
    for name, values in mup.items():
        assert max(values) < 1.35 * values[0], name
        assert min(values) > values[0] / 1.6, name
    assert all(plain[f"layer {index}"][-1] > 2.5 * plain[f"layer {index}"][0] for index in range(2))


# The same numbers


@pytest.mark.parametrize(("style", "precision"), [("gpt3", "16_bit_head"), ("llama", "head"), ("experts", "bf16")])
def test_width_1_is_no_mup(ranks: RankPool, style: str, precision: str) -> None:
    """With the softmax's usual power; and muP's own power gives other numbers."""
    plain, mup, other = (
        ranks.run(train_tiny_gpt, tiny_config(model, precision=PRECISIONS[precision]), BATCHES, num_ranks=1)[0]
        for model in (
            STYLES[style],
            replace(STYLES[style], use_mup=True, mup_attn_scale_power=0.5),
            replace(STYLES[style], use_mup=True),
        )
    )
    assert_same_bits(mup, plain)
    assert other.losses != plain.losses


def _by_hand(gpt: TinyGPT) -> None:
    """Give a model of twice the width muP's numbers, from outside: weights, rates, scores, embedding and logits."""
    for chunk in gpt.chunks:
        model = chunk.module
        model.embedding.register_forward_hook(lambda _, args, output: output * 3.0)
        model.output_layer.register_forward_hook(lambda _, args, output: (output[0] * 0.5, None))
        for layer in model.decoder.layers:
            layer.self_attention.core_attention.softmax_scale = math.sqrt(8.0) / 32
    masters = _masters(gpt)
    hidden = [name for name, value in masters.items() if value.ndim == 2 and "embedding" not in name]
    gpt.optimizer.load_weights((masters | {name: masters[name] / math.sqrt(2.0) for name in hidden}).items())


def test_model_is_the_one_by_hand(ranks: RankPool) -> None:
    """A tied GPT in BF16, whose sums are rounded elsewhere: gradients keep some 45 dB."""
    model = replace(GPT3_STYLE, **TWICE)
    (loss, norm, grads), (expected_loss, expected_norm, expected) = (
        ranks.run(gradients, tiny_config(own, precision=PRECISIONS["bf16"]), by_hand, num_ranks=1)[0]
        for own, by_hand in ((model, None), (GPT3_STYLE, _by_hand))
    )
    assert loss == pytest.approx(expected_loss, abs=2e-4) and norm == pytest.approx(expected_norm, rel=2e-3)
    assert grads.keys() == expected.keys()
    for name, grad in expected.items():
        if not name.endswith("linear_qkv.bias"):  # a key's bias has no gradient but rounding
            assert snr_db(grads[name], grad) > 35.0, name


@pytest.mark.parametrize(("style", "chunk"), [("llama", None), ("llama", 8), ("gpt3", None)])
def test_fp8_head_multiplies_as_the_16_bit_head_does(ranks: RankPool, style: str, chunk: int | None) -> None:
    """The loss in FP8 is off by some 10⁻³. The final norm's gradients are sums over tokens of FP8 products: 20 dB, and
    far less if they missed the factor of 3."""
    model = replace(STYLES[style], use_mup=True, mup_output_mult=3.0)
    runs = []
    for precision in ("16_bit_head", "head"):
        config = tiny_config(model, precision=PRECISIONS[precision])
        config = replace(config, training=replace(config.training, loss_chunk_size=chunk))
        runs.append(ranks.run(gradients, config, num_ranks=1)[0])
    (expected, norm, plain), (found, found_norm, grads) = runs
    assert found == pytest.approx(expected, abs=2e-2) and found_norm == pytest.approx(norm, rel=5e-2)
    names = [name for name in plain if "final_layernorm" in name]
    assert len(names) == (2 if style == "gpt3" else 1)
    assert all(snr_db(grads[name], plain[name]) > 15.0 for name in names)


@pytest.mark.parametrize(
    ("style", "precision", "layout"),
    [
        ("gpt3", "bf16", "tp2_sp_pp2"),
        ("gpt3", "16_bit_head", "pp2"),
        ("llama", "head", "tp2_sp"),
        ("llama", "bf16", "cp2"),
        ("gpt3", "head", "dp2"),
        ("experts", "bf16", "ep2"),
        ("experts", "tensorwise", "ep2"),
    ],
)
def test_layouts(ranks: RankPool, style: str, precision: str, layout: str) -> None:
    """The bounds are those of `tests.parallel.test_layouts`."""
    model, usual = replace(STYLES[style], **TWICE), {"ep2": (2, ParallelConfig(expert_model_parallel_size=2))} | LAYOUTS
    num_ranks, parallel = usual[layout]
    optimizer = tiny_optimizer(lr=1e-3)
    one, shared = (
        run(ranks, model, PRECISIONS[precision], name, BATCHES, parallel=own, optimizer=optimizer)
        for name, own in (("one", None), ({2: "dp2", 4: "tp2_sp_pp2"}[num_ranks], parallel))
    )
    assert one.losses[0] - one.losses[-1] > 0.3
    is_bf16 = precision == "bf16"
    assert shared.losses == pytest.approx(one.losses, abs=2e-3 if is_bf16 else 1e-2)
    assert shared.grad_norms == pytest.approx(one.grad_norms, rel=1.5e-2 if is_bf16 else 0.1)


@pytest.mark.parametrize(("precision", "optimizer"), [("16_bit_head", "adam"), ("head", "muon"), ("bf16", "sgd")])
def test_resuming_is_not_noticed(ranks: RankPool, tmp_path: Path, precision: str, optimizer: str) -> None:
    rules = tiny_optimizer(optimizer=optimizer, lr=1e-3)
    config = tiny_config(
        replace(LLAMA_STYLE, num_layers=1, **TWICE),
        parallel=ParallelConfig(ddp_bucket_size=1 << 15),
        precision=PRECISIONS[precision],
        optimizer=rules,
    )
    straight = ranks.run(run_tiny_on_a_rank, config, 4, None, None, None, 4, num_ranks=2)
    ranks.run(run_tiny_on_a_rank, config, 2, None, tmp_path, None, 4, num_ranks=2)
    resumed = ranks.run(run_tiny_on_a_rank, config, 2, tmp_path, None, None, 4, num_ranks=2)
    for end, expected in zip(resumed, straight, strict=True):
        assert end.losses == expected.losses[2:]
        assert all(torch.equal(end.end[name], value) for name, value in expected.end.items())


# megatron-core's own muP

overrides_of_mup: Any = getattr(core_optimizer, "get_mup_config_overrides", None)
has_mup = pytest.mark.skipif(overrides_of_mup is None, reason="megatron-core has muP from 0.19 on")


def _cores_model(config: Config) -> GPTModel:
    """megatron-core's GPT in BF16 with its own muP, initialised by it."""
    model = config.model
    names = ("mup_base_hidden_size", "mup_embedding_mult", "mup_output_mult", "mup_base_head_dim")
    own: dict[str, Any] = {name: getattr(model, name) for name in (*names, "mup_attn_scale_power")}
    absent = ("softmax_scale", "init_method", "output_layer_init_method", "embedding_init_method")
    settings = replace(
        transformer_config(config, CPU),
        use_mup=True,
        perform_initialization=True,
        **dict.fromkeys(absent),
        **own,
    )
    return GPTModel(
        settings,
        get_gpt_layer_local_spec(normalization=model.normalization),
        vocab_size=VOCAB_SIZE,
        max_sequence_length=model.seq_length,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
    ).bfloat16()


def _compare_with_core(gpt: TinyGPT, config: Config) -> tuple[float, float, dict[str, tuple[float, float]]]:
    """Losses of this model and of megatron-core's with the same weights, and the spreads of both initial weights."""
    core = _cores_model(config)
    masters = _masters(gpt)
    spreads = {}
    with torch.no_grad():
        for name, param in core.named_parameters():
            spreads[name] = masters[name].std().item(), param.float().std().item()
            param.copy_(masters[name])
    tokens, length = BATCHES[0, 0], config.model.seq_length
    future = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    positions = torch.arange(length).expand(len(tokens), length)
    theirs = core(tokens[:, :-1].contiguous(), positions, future, labels=tokens[:, 1:].contiguous()).mean().item()
    return forward_backward(gpt, config, BATCHES[0, :1]), theirs, spreads


@has_mup
@pytest.mark.parametrize("style", ["gpt3", "llama"])
def test_model_is_megatrons(ranks: RankPool, style: str) -> None:
    """Logits of about 0.5 in BF16. Without the factor of embedding or logits the loss is off by more than 10⁻²."""
    config = tiny_config(replace(STYLES[style], init_method_std=0.1, **TWICE), precision=PRECISIONS["bf16"])
    ((ours, theirs, spreads),) = ranks.run(with_gpt, config, _compare_with_core, num_ranks=1)
    assert ours == pytest.approx(theirs, abs=2e-3)
    for name, (own, other) in spreads.items():
        assert own == pytest.approx(other, rel=0.05), name


def _cores_rates(gpt: TinyGPT, config: Config) -> dict[str, tuple[float, float, float]]:
    """Peak, end of the decay and ε of every parameter, as megatron-core overrides them."""
    optimizer = config.optimizer
    settings = core_optimizer.OptimizerConfig(
        optimizer=optimizer.optimizer,
        lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        adam_eps=optimizer.adam_eps,
        decoupled_lr=optimizer.decoupled_lr,
    )
    found = {}
    core = _cores_model(config)
    overrides = overrides_of_mup(settings, config.model.width_mult, optimizer.optimizer)
    for name, param in core.named_parameters():
        is_decoupled = optimizer.decoupled_lr is not None and is_embedding_or_output(param)
        own = {"max_lr": optimizer.decoupled_lr if is_decoupled else optimizer.lr, "min_lr": optimizer.min_lr}
        own["eps"] = optimizer.adam_eps if optimizer.optimizer == "adam" else 0.0
        for key, override in overrides.items():
            if key.matches(param, name):
                own |= override
        found[name] = own["max_lr"], own["min_lr"], own["eps"]
    return found


@has_mup
@pytest.mark.parametrize("decoupled", [None, 3e-3])
@pytest.mark.parametrize("optimizer", ["adam", "lion", "sgd"])
def test_learning_rates_are_megatrons(ranks: RankPool, optimizer: str, decoupled: float | None) -> None:
    rules = tiny_optimizer(optimizer=optimizer, lr=1e-2, min_lr=1e-3, decoupled_lr=decoupled)
    config = tiny_config(replace(GPT3_STYLE, **TWICE), precision=PRECISIONS["bf16"], optimizer=rules)
    (ours,) = ranks.run(with_gpt, config, _rates, num_ranks=1)
    (theirs,) = ranks.run(with_gpt, config, _cores_rates, num_ranks=1)
    assert ours.keys() == theirs.keys() and len({rates[0] for rates in theirs.values()}) >= 2
    for name, rates in theirs.items():
        assert ours[name][:3] == pytest.approx(rates), name
