"""The losses of transformers' language models over 16-bit logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fp8_megatron
from fp8_megatron.any_model.losses import causal_lm_loss, masked_lm_loss

loss_utils = pytest.importorskip("transformers.loss.loss_utils")
transformers = pytest.importorskip("transformers")

PAIRS = [(causal_lm_loss, loss_utils.ForCausalLMLoss), (masked_lm_loss, loss_utils.ForMaskedLMLoss)]
VOCAB = 48


def drawn(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    labels = torch.randint(VOCAB, (3, 16))
    labels[:, 5:9] = -100
    return (4 * torch.randn(3, 16, VOCAB)).to(dtype).requires_grad_(), labels


def loss_and_grad(loss: Callable[..., Tensor], logits: Tensor, *given: Any, **settings: Any) -> tuple[Tensor, Tensor]:
    value = loss(logits, *given, **settings)
    (grad,) = torch.autograd.grad(1.7 * value, logits)
    return value.detach(), grad


@pytest.mark.parametrize(("own", "theirs"), PAIRS, ids=["causal", "masked"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("settings", [{}, {"num_items_in_batch": 31}, {"num_items_in_batch": torch.tensor(31)}])
def test_it_is_transformers_loss(
    own: Callable[..., Tensor], theirs: Callable[..., Tensor], dtype: torch.dtype, settings: dict[str, Any]
) -> None:
    """Both compute in FP32 from the same 16 bits, and round the gradient once."""
    logits, labels = drawn(dtype)
    before = logits.detach().clone()
    value, grad = loss_and_grad(own, logits, labels, VOCAB, **settings)
    expected, expected_grad = loss_and_grad(theirs, logits, labels, VOCAB, **settings)
    assert value.dtype == torch.float32 and torch.allclose(value, expected, rtol=1e-6)
    step = torch.finfo(dtype).eps * expected_grad.abs() + torch.finfo(dtype).smallest_normal
    assert grad.dtype == dtype and ((grad.float() - expected_grad.float()).abs() <= step).all()
    assert torch.equal(logits, before)
    ignored = labels if own is masked_lm_loss else torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    assert not grad[ignored == -100].any()


def test_labels_may_come_shifted() -> None:
    logits, labels = drawn()
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    values = [causal_lm_loss(logits, labels, VOCAB, shift_labels=each) for each in (None, shifted)]
    assert torch.equal(*values)


@pytest.mark.parametrize(("own", "theirs"), PAIRS, ids=["causal", "masked"])
@pytest.mark.parametrize("columns", [False, True], ids=["every other token", "a vocabulary without its padding"])
def test_logits_may_be_a_part_of_a_tensor(
    own: Callable[..., Tensor], theirs: Callable[..., Tensor], columns: bool
) -> None:
    whole, labels = drawn()
    part, labels, size = (
        (whole[..., :-8], labels % (VOCAB - 8), VOCAB - 8) if columns else (whole[:, ::2], labels[:, ::2], VOCAB)
    )
    assert not part.is_contiguous()
    value, grad = loss_and_grad(own, part, labels, size)
    expected, expected_grad = loss_and_grad(theirs, part, labels, size)
    assert torch.allclose(value, expected, rtol=1e-6)
    assert (grad - expected_grad).norm() <= torch.finfo(torch.bfloat16).eps * expected_grad.norm()


def test_other_numbers_of_labels_and_tokens_are_an_error() -> None:
    logits, labels = drawn()
    for own, _ in PAIRS:
        with pytest.raises(ValueError, match="30 labels do not match the logits of 48 tokens"):
            own(logits, labels[:, :10], VOCAB)


def test_an_unknown_label_is_an_error() -> None:
    logits, labels = drawn()
    labels[1, 3] = VOCAB
    with pytest.raises(RuntimeError, match="neither below 48 nor -100"):
        masked_lm_loss(logits, labels, VOCAB)


def test_logits_in_32_bits_have_transformers_loss() -> None:
    logits, labels = drawn(torch.float32)
    for own, theirs in PAIRS:
        assert torch.equal(own(logits, labels, VOCAB), theirs(logits, labels, VOCAB))


def tiny(kind: str = "qwen3") -> torch.nn.Module:
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(
        kind,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCAB,
        pad_token_id=0,
        use_cache=False,
    )
    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def initialized(model: torch.nn.Module) -> torch.nn.Module:
    return fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3))[0]


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text"])
def test_initialize_gives_it_to_models_of_transformers(kind: str) -> None:
    """Losses and gradients are those with transformers' loss, and the logits of the output stay."""
    model = initialized(tiny(kind))
    assert model._loss_function is causal_lm_loss
    assert not any(hasattr(module, "_loss_function") for module in model.model.modules())
    ids = torch.randint(VOCAB, (2, 16))
    results = []
    for loss in (model.loss_function, loss_utils.ForCausalLMLoss):
        model.loss_function = loss
        with torch.autocast("cpu", torch.bfloat16):
            output = model(input_ids=ids, labels=ids)
        kept = output.logits.detach().clone()
        (grad,) = torch.autograd.grad(output.loss, model.model.norm.weight)
        assert output.logits.dtype == torch.bfloat16 and torch.equal(output.logits, kept)
        results.append((output.loss.detach(), grad))
    (value, grad), (expected, expected_grad) = results
    assert torch.allclose(value, expected, rtol=1e-6)
    assert (grad - expected_grad).norm() <= 1e-3 * expected_grad.norm()


def test_a_model_that_names_no_loss_has_that_of_the_next_token() -> None:
    """As transformers takes it; its parts without a head have none."""
    config = transformers.GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=VOCAB, use_cache=False)
    model = initialized(transformers.GPT2LMHeadModel(config))
    assert model.loss_type is None and model._loss_function is causal_lm_loss
    assert not hasattr(model.transformer, "_loss_function")


def test_a_loss_of_the_users_own_stays() -> None:
    model = tiny()
    model.loss_function = own = lambda logits, labels, vocab_size, **unused: logits.float().mean()
    assert initialized(model).loss_function is own


class LossTypes(torch.nn.Module):
    """A module of a user, whose `loss_type` is none of transformers'."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.loss_type = torch.nn.Linear(16, 16), ["l1", "l2"]


def test_a_loss_type_of_another_library_stays() -> None:
    assert initialized(LossTypes()).loss_type == ["l1", "l2"]


def test_a_compiled_one_is_transformers() -> None:
    logits, labels = drawn()
    compiled = torch.compile(causal_lm_loss, backend="aot_eager", fullgraph=True)
    theirs = loss_and_grad(loss_utils.ForCausalLMLoss, logits, labels, VOCAB)
    for each, expected in zip(loss_and_grad(compiled, logits, labels, VOCAB), theirs, strict=True):
        assert torch.allclose(each, expected, rtol=1e-6)
