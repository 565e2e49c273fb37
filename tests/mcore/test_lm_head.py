"""The FP8 LM head with its norm and loss against float64: values, every gradient, what it keeps and lets go of.

Noise powers of operands add (see test_linear.py): 28.5 dB of E4M3 × E4M3 in the logits. The gradient of the logits has
most of its power in the labels' elements, which are exact, so dgrad and wgrad have the 31.5 dB of their other operand,
E4M3. The logits' noise reaches the loss and its gradient through a softmax: of logits of size 1 it moves each
probability by 4%, which beside the label's −1 is nothing. A sample of 61 labels has ±10·log10(1 + √(2/61)) = 0.7 dB;
tests allow 1 dB, and 2 dB in sums over tokens, to which all elements of a row add the same error.
"""

from __future__ import annotations

import pytest
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import Tensor

from fp8_megatron.config.schema import ParallelConfig
from fp8_megatron.dtypes import E4M3
from fp8_megatron.kernels import ops
from fp8_megatron.mcore.lm_head import FP8OutputLayer
from fp8_megatron.mcore.norm import DeferredNorm
from fp8_megatron.mcore.runtime import runtime
from fp8_megatron.mcore.topology import initialized
from fp8_megatron.nn import lm_head
from fp8_megatron.nn.lm_head import fp8_norm_head_logits, fp8_norm_head_loss
from fp8_megatron.nn.normed import NormParams
from fp8_megatron.nn.parallelism import LOCAL
from fp8_megatron.quantization.recipe import HeadQuantizers, Recipe
from fp8_megatron.quantization.stats import snr_db
from tests.harness.ranks import RankPool
from tests.mcore.parallel_layer import layer_config

E4M3_E4M3_DB = 28.5 - 1.0
E4M3_DB = 31.5 - 1.0
SUMS_DB = 31.5 - 2.0
#: One rounding to BF16 less 1 dB (test_linear.py).
BF16_DB = 54.5
FP32_DB = 100.0
SEQ, BATCH, HIDDEN, VOCAB = 16, 4, 128, 768


class Problem:
    """x, a norm, a head and labels; the loss leaves token 5 and the last ones out and weighs the others differently."""

    def __init__(self, *, rms: bool = False, seed: int = 0, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int, size: float) -> Tensor:
            return (torch.randn(*shape, generator=generator) * size).to(device)

        self.x = normal(SEQ, BATCH, HIDDEN, size=2.0).bfloat16().requires_grad_()
        weight = (1 + normal(HIDDEN, size=0.2)).bfloat16().requires_grad_()
        bias = None if rms else normal(HIDDEN, size=0.2).bfloat16().requires_grad_()
        self.norm = NormParams(weight, bias, 1e-5, rms)
        self.weight = normal(VOCAB, HIDDEN, size=0.08).bfloat16().requires_grad_()
        self.labels = torch.randint(VOCAB, (SEQ, BATCH), generator=generator).to(device)
        self.cotangent = (torch.rand(SEQ, BATCH, generator=generator) * 1e-3).to(device)
        self.cotangent.view(-1)[5] = 0.0
        self.cotangent[-3:] = 0.0

    def loss(self, quantizers: HeadQuantizers | None = None, vocab_size: int | None = None) -> Tensor:
        return fp8_norm_head_loss(
            self.x, self.norm, self.weight, self.labels, quantizers or current(), LOCAL, vocab_size
        )

    def leaves(self) -> dict[str, Tensor]:
        named = {"x": self.x, "weight": self.weight, "norm.weight": self.norm.weight, "norm.bias": self.norm.bias}
        return {name: leaf for name, leaf in named.items() if leaf is not None}

    def take_grads(self) -> dict[str, Tensor]:
        grads = {}
        for name, leaf in self.leaves().items():
            assert leaf.grad is not None, name
            grads[name], leaf.grad = leaf.grad, None
        return grads

    def exact(self, cotangent: Tensor | None = None) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Logits, loss and gradients in float64."""
        leaves = {name: leaf.detach().double().requires_grad_() for name, leaf in self.leaves().items()}
        x, weight, shape = leaves["x"], leaves["norm.weight"], (HIDDEN,)
        if self.norm.rms:
            normed = torch.nn.functional.rms_norm(x, shape, weight, self.norm.eps)
        else:
            normed = torch.nn.functional.layer_norm(x, shape, weight, leaves["norm.bias"], self.norm.eps)
        logits = normed @ leaves["weight"].t()
        loss = exact_loss(logits, self.labels)
        loss.backward(self.cotangent.double() if cotangent is None else cotangent.double())
        return logits.detach(), loss.detach(), {name: leaf.grad for name, leaf in leaves.items()}  # type: ignore[misc]


def least_db(name: str) -> float:
    return SUMS_DB if name.startswith("norm.") else E4M3_DB


def exact_loss(logits: Tensor, labels: Tensor) -> Tensor:
    flat = torch.nn.functional.cross_entropy(logits.double().flatten(0, 1), labels.view(-1), reduction="none")
    return flat.view(labels.shape)


def current(power_of_two: bool = False) -> HeadQuantizers:
    return Recipe("tensorwise", power_of_two).head_quantizers()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[1, 3], ids=["whole", "three_parts"])
def num_parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(lm_head, "_PART_COLUMNS", VOCAB // request.param)
    assert len(lm_head._parts(torch.empty(VOCAB, 1))) == request.param
    return request.param


@pytest.mark.parametrize("rms", [False, True], ids=["layernorm", "rmsnorm"])
def test_against_float64(rms: bool, num_parts: int, device: str) -> None:
    p = Problem(rms=rms, device=device)
    logits, _, grads = p.exact()
    measured = fp8_norm_head_logits(p.x, p.norm, p.weight, current(), LOCAL)
    assert measured.dtype == torch.bfloat16 and measured.shape == (SEQ, BATCH, VOCAB)
    assert snr_db(measured, logits) > E4M3_E4M3_DB
    loss = p.loss()
    assert loss.dtype == torch.float32 and loss.shape == (SEQ, BATCH)
    assert snr_db(loss.detach(), exact_loss(measured, p.labels)) > FP32_DB  # the loss is of just those logits
    loss.backward(p.cotangent)
    for name, grad in p.take_grads().items():
        assert grad.shape == grads[name].shape
        assert snr_db(grad, grads[name]) > least_db(name), name


def test_padding_rows_take_no_part(num_parts: int, device: str) -> None:
    """300 tokens in 768 rows: of three parts, the second is padded in part and the third is padding alone."""
    p, tokens = Problem(device=device), 300
    p.labels %= tokens
    with torch.no_grad():
        p.weight[tokens:] *= 3.0
    logits = fp8_norm_head_logits(p.x, p.norm, p.weight, current(), LOCAL)
    loss = p.loss(vocab_size=tokens)
    assert snr_db(loss.detach(), exact_loss(logits[..., :tokens], p.labels)) > FP32_DB
    loss.backward(p.cotangent)
    grads = p.take_grads()
    assert not grads["weight"][tokens:].any()
    with torch.no_grad():
        p.weight = p.weight[:tokens].clone().requires_grad_()
    _, _, expected = p.exact()
    grads["weight"] = grads["weight"][:tokens]
    for name, grad in grads.items():
        assert snr_db(grad, expected[name]) > least_db(name), name


def test_a_masked_token_gives_nothing(num_parts: int, device: str) -> None:
    p = Problem(device=device)
    p.loss().backward(p.cotangent)
    grad = p.take_grads()["x"].view(-1, HIDDEN)
    masked = p.cotangent.view(-1) == 0
    assert masked.sum() > 10
    assert not grad[masked].any() and grad[~masked].any(dim=1).all()


def test_a_small_weight_of_a_token_is_not_lost(num_parts: int, device: str) -> None:
    """Tokens whose losses count 2⁻¹⁶ times as much as others' keep their gradients, because each has its own scale."""
    p = Problem(device=device)
    p.cotangent[3:8] *= 2.0**-16
    expected = p.exact()[2]["x"][3:8]
    p.loss().backward(p.cotangent)
    assert snr_db(p.take_grads()["x"][3:8], expected) > E4M3_DB - 0.5  # a smaller sample: 20 labels


def _shares(p: Problem) -> Tensor:
    """Probabilities [T, V] of the FP8 logits, float64."""
    return torch.softmax(fp8_norm_head_logits(p.x, p.norm, p.weight, current(), LOCAL).double().flatten(0, 1), dim=1)


def test_gradients_of_tokens_sum_to_zero_over_the_vocabulary(
    num_parts: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scale for all tokens would round labels' elements −(1 − p) to −1 and leave −0.9 to −1.6% of each on average.

    Labels are drawn from the model's probabilities, as if it were trained. The other elements have rounding errors,
    evenly spread over a step. A step is 1/7 of a number in the middle of an octave, so an error has 4.1% of it. The
    mean over tokens has the standard deviation 4.1% · √Σ q² / T, with q = p / (1 − p of the label); the test allows
    three.
    """
    p = Problem(device=device)
    with torch.no_grad():
        p.weight *= 3.0
    shares = _shares(p).cpu()
    draws = torch.multinomial(shares.float(), 1, generator=torch.Generator().manual_seed(3))
    p.labels = draws.view(SEQ, BATCH).to(device)
    others = shares.scatter(1, draws, 0.0) / (1.0 - shares.gather(1, draws))
    sums = torch.zeros(SEQ * BATCH, dtype=torch.float64)
    backward = ops.cross_entropy_backward_quantize

    def spy(*args, **kwargs) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        payload, payload_t = backward(*args, **kwargs)
        sums.add_(payload.double().sum(dim=1).cpu())
        assert torch.equal(payload.double().t(), payload_t.double())
        return payload, payload_t

    monkeypatch.setattr(ops, "cross_entropy_backward_quantize", spy)
    p.loss().backward(torch.ones_like(p.cotangent))
    assert abs(sums.mean().item()) / 2.0**15 < 3 * 0.041 * others.square().sum().sqrt().item() / len(others)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_the_gradient_follows_a_loss_scale_exactly(power_of_two: bool, num_parts: int, device: str) -> None:
    """Its scale is made of the upstream gradient: 2²⁰ times that is the same payload."""
    p, grads = Problem(device=device), []
    for factor in (1.0, 2.0**20):
        p.loss(current(power_of_two)).backward(p.cotangent * factor)
        grads.append(p.take_grads())
    for name, grad in grads[0].items():
        assert torch.equal(grads[1][name], grad * 2.0**20), name


def test_labels_that_are_certain_or_out_of_reach(num_parts: int, device: str) -> None:
    """p is 1 in FP32 for tokens that the head is sure of, and 0 for others. A loss of 400 has steps of 3·10⁻⁵, which
    is what the first can be wrong by; the others' largest elements are the label's, which is exact, and another's."""
    p = Problem(device=device)
    with torch.no_grad():
        p.weight *= 200.0
    logits = fp8_norm_head_logits(p.x, p.norm, p.weight, current(), LOCAL)
    sure = (torch.arange(SEQ * BATCH, device=device) % 2 == 0).view(SEQ, BATCH)
    p.labels = torch.where(sure, logits.argmax(dim=-1), logits.argmin(dim=-1))
    cotangent = torch.where(p.cotangent > 0, 1e-3, 0.0)
    loss = p.loss()
    assert (loss[sure] == 0).sum() > 20 and not torch.exp(-loss[~sure]).any()
    loss.backward(cotangent)
    grads = p.take_grads()
    of_tokens = grads["x"].view(-1, HIDDEN).abs().amax(dim=1)
    assert not of_tokens[cotangent.view(-1) == 0].any()
    assert of_tokens[(loss == 0).view(-1)].max() < 1e-4 * of_tokens.max()
    shares = torch.softmax(logits.double().view(-1, VOCAB), dim=-1)
    unit = shares.scatter_add(1, p.labels.view(-1, 1), torch.full_like(shares[:, :1], -1.0))
    normed = ops.decode(*_cast_norm(p)).double()
    expected = (unit * cotangent.view(-1, 1)).t() @ normed
    assert snr_db(grads["weight"], expected) > 25.0  # E5M2 beside E4M3, twice


def _cast_norm(p: Problem) -> tuple[Tensor, Tensor]:
    """norm(x) in E4M3 [T, h], and its scale."""
    x = p.x.detach().view(-1, HIDDEN)
    payload, scale, *_ = ops.norm_quantize(
        x, p.norm.weight.detach(), p.norm.bias, E4M3, eps=p.norm.eps, rms=p.norm.rms, scale=None
    )
    return payload, scale


def test_a_tied_weight_gets_both_gradients() -> None:
    p = Problem()
    tokens = torch.randint(VOCAB, (SEQ, BATCH), generator=torch.Generator().manual_seed(1))
    p.loss().backward(p.cotangent)
    of_head = p.take_grads()["weight"]
    embedded = torch.nn.functional.embedding(tokens, p.weight)
    g = torch.randn(embedded.shape, generator=torch.Generator().manual_seed(2)).bfloat16() * 1e-4
    embedded.backward(g)
    assert p.weight.grad is not None
    of_embedding, p.weight.grad = p.weight.grad, None
    calls = []
    p.weight.register_post_accumulate_grad_hook(lambda weight: calls.append(weight.grad.clone()))
    torch.autograd.backward([torch.nn.functional.embedding(tokens, p.weight), p.loss()], [g, p.cotangent])
    (both,) = calls  # once a micro-batch: data parallelism counts on it
    assert torch.equal(both, of_head + of_embedding)


def test_keeps_its_input_and_the_logits_only(num_parts: int) -> None:
    p, kept = Problem(), []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        p.loss()
    tokens = SEQ * BATCH
    parameters = p.weight.nbytes
    statistics = 4 * (4 * tokens + 1) + 8 * tokens  # mean, rstd, log Σ exp, the label's logit and a scale; labels
    assert sum(tensor.nbytes for tensor in kept) == p.x.nbytes + parameters + statistics
    kept.clear()
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        evaluated = p.loss()
    assert kept == [] and torch.equal(evaluated, p.loss().detach())


@pytest.mark.gpu
def test_peak_memory() -> None:
    """Beside the logits no more than a third of them, as the first of three parts is cast; wgrad's output is later."""
    tokens, hidden, vocabulary = 4096, 1024, 50304
    x = torch.randn(tokens, 1, hidden, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(vocabulary, hidden, device="cuda") * 0.02).bfloat16().requires_grad_()
    norm = NormParams(torch.ones(hidden, device="cuda").bfloat16().requires_grad_(), None, 1e-5, True)
    labels = torch.randint(vocabulary, (tokens, 1), device="cuda")
    for _ in range(2):  # the first compiles
        x.grad = weight.grad = norm.weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = fp8_norm_head_loss(x, norm, weight, labels, current(), LOCAL)
        loss.backward(torch.rand_like(loss))
        peak = torch.cuda.max_memory_allocated() - before
        del loss
    logits = 2 * tokens * vocabulary
    assert logits < peak < logits * 4 / 3 + 2**24, peak


def test_a_second_backward_is_refused() -> None:
    p = Problem()
    loss = p.loss()
    loss.backward(p.cotangent, retain_graph=True)
    with pytest.raises(AssertionError, match="gave the logits up"):
        loss.backward(p.cotangent)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_bad_values_reach_the_gradients(bad: float, num_parts: int, device: str) -> None:
    p = Problem(device=device)
    cotangent = p.cotangent.clone()
    cotangent[0, 0] = bad
    p.loss().backward(cotangent)
    assert all(not grad.isfinite().all() for grad in p.take_grads().values())
    with torch.no_grad():
        p.x[0, 0, 0] = bad
    loss = p.loss()
    assert not loss.isfinite().all()
    loss.backward(p.cotangent)
    assert all(not grad.isfinite().all() for grad in p.take_grads().values())


# The module, on one rank and on two.


def _problem_of_equal_halves() -> Problem:
    """Both halves of the vocabulary have one amax, and so one scale whether they are parts, shards or one; tokens of
    the sequence's halves differ in size."""
    p = Problem()
    with torch.no_grad():
        p.weight[0, 0] = p.weight[VOCAB // 2, 0] = 0.5
    return p


def _run_module(tp: int, sequence_parallel: bool, part_columns: int) -> dict[str, Tensor]:
    """This rank's loss, logits and gradients."""
    with pytest.MonkeyPatch.context() as patch:  # a rank's process runs other tests afterwards
        patch.setattr(lm_head, "_PART_COLUMNS", part_columns)
        return _results_of_module(tp, sequence_parallel)


def _results_of_module(tp: int, sequence_parallel: bool) -> dict[str, Tensor]:
    p = _problem_of_equal_halves()
    parallel = ParallelConfig(tensor_model_parallel_size=tp, sequence_parallel=sequence_parallel)
    cpu = torch.device("cpu")
    with runtime(cpu), initialized(parallel, 1, cpu) as topology:
        rank, config = topology.tp.rank(), layer_config(HIDDEN, tp, sequence_parallel=sequence_parallel)
        plain = ColumnParallelLinear(
            HIDDEN, VOCAB, config=config, init_method=torch.nn.init.zeros_, bias=False, tp_group=topology.tp
        )
        norm = DeferredNorm(config, HIDDEN)
        head = FP8OutputLayer(plain, norm, Recipe("tensorwise", False))
        assert head.weight is plain.weight and dict(head.named_parameters()).keys() == {"weight"}
        with torch.no_grad():
            head.weight.copy_(p.weight.chunk(tp)[rank])
            norm.weight.copy_(p.norm.weight)
            norm.bias.copy_(p.norm.bias)
        x = p.x.detach().chunk(tp)[rank] if sequence_parallel else p.x.detach()
        x = x.clone().requires_grad_()
        loss, bias = head(norm(x), labels=p.labels)
        assert bias is None
        loss.backward(p.cotangent)
        with torch.no_grad():
            logits, _ = head(norm(x), runtime_gather_output=True)
        with pytest.raises(RuntimeError, match=r"no gradient of logits.*labels"):
            head(norm(x))
        return {
            "loss": loss.detach(),
            "logits": logits,
            "x": x.grad,
            "weight": head.weight.grad,
            "norm.weight": norm.weight.grad,
            "norm.bias": norm.bias.grad,
        }


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("part_columns", [VOCAB, 128], ids=["whole", "parts"])
def test_two_ranks_compute_what_one_does(ranks: RankPool, sequence_parallel: bool, part_columns: int) -> None:
    """Against float64; and whole shards against two parts on one rank: the same GEMMs, only dgrad is a sum of two."""
    (single,) = ranks.run(_run_module, 1, False, VOCAB // 2 if part_columns == VOCAB else part_columns, num_ranks=1)
    parts = ranks.run(_run_module, 2, sequence_parallel, part_columns, num_ranks=2)
    double = dict(parts[0])
    double["weight"] = torch.cat([part["weight"] for part in parts])
    if sequence_parallel:
        double["x"] = torch.cat([part["x"] for part in parts])
        for name in ("norm.weight", "norm.bias"):  # summed over the group after backward
            double[name] = parts[0][name].double() + parts[1][name].double()
    for name in ("loss", "logits") + (() if sequence_parallel else ("x", "norm.weight", "norm.bias")):
        assert torch.equal(parts[0][name], parts[1][name]), name
    p = _problem_of_equal_halves()
    logits, _, grads = p.exact()
    for result in (single, double):
        assert snr_db(result["logits"], logits) > E4M3_E4M3_DB
        assert snr_db(result["loss"], exact_loss(result["logits"], p.labels)) > FP32_DB
        for name, grad in grads.items():
            assert snr_db(result[name], grad) > least_db(name), name
    if part_columns == VOCAB:
        torch.testing.assert_close(double["loss"], single["loss"], rtol=1e-5, atol=1e-5)
        assert torch.equal(double["logits"], single["logits"])
        assert snr_db(double["weight"], single["weight"]) > BF16_DB
        for name in ("x", "norm.weight", "norm.bias"):
            assert snr_db(double[name], single[name]) > BF16_DB - 8.0, name


def test_a_vocabulary_that_the_tensor_cores_refuse_raises() -> None:
    with runtime(torch.device("cpu")):
        plain = ColumnParallelLinear(
            HIDDEN,
            100,
            config=layer_config(HIDDEN, 1, sequence_parallel=False),
            init_method=torch.nn.init.zeros_,
            bias=False,
            tp_group=_GroupOfOne(),
        )
        norm = DeferredNorm(layer_config(HIDDEN, 1, sequence_parallel=False), HIDDEN)
        with pytest.raises(ValueError, match=r"100 rows .* not a multiple of 16; choose a --make-vocab-size"):
            FP8OutputLayer(plain, norm, Recipe("tensorwise", False))
        with pytest.raises(ValueError, match="M=4 is not a multiple of 16"):
            p = Problem()
            fp8_norm_head_logits(p.x[:1], p.norm, p.weight, current(), LOCAL)


class _GroupOfOne:
    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0
