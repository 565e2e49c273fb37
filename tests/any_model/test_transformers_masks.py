"""Recorded steps of transformers' models, which look at positions and masks and wait for the GPU."""

from __future__ import annotations

import copy
import logging
import traceback
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fp8_megatron.any_model.recorded_step import RecordedStep, RecordingError
from tests.harness.played_recordings import recorded

transformers = pytest.importorskip("transformers")
masking_utils = pytest.importorskip("transformers.masking_utils")

aten = torch.ops.aten
ROWS, LENGTH, VOCAB = 2, 12, 32


def model_of() -> torch.nn.Module:
    torch.manual_seed(0)
    shape = {"n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": VOCAB}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model: torch.nn.Module = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**shape, **dropout, use_cache=False, attn_implementation="sdpa")
    )
    return model


def loss_of(model: torch.nn.Module) -> Callable[[dict[str, Tensor]], Tensor]:
    def compute(batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = model(**batch, labels=batch["input_ids"]).loss
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return compute


def batch(seed: int, *starts: int) -> dict[str, Tensor]:
    """Tokens; with `starts`, positions of sequences that begin there too."""
    tokens = torch.randint(VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))
    if not starts:
        return {"input_ids": tokens}
    positions = torch.cat([torch.arange(end - start) for start, end in pairwise([0, *starts, LENGTH])])
    return {"input_ids": tokens, "position_ids": positions.expand(ROWS, -1).contiguous()}


def losses(step: Callable[[dict[str, Tensor]], Tensor], model: torch.nn.Module, batches: list[Any]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    for each in batches:
        found.append(step(each).item())
        optimizer.step()
        optimizer.zero_grad()
    return found


def both(batches: list[dict[str, Tensor]]) -> tuple[RecordedStep, list[float], list[float]]:
    """The recorded step, and losses with and without it."""
    model = model_of()
    plain = copy.deepcopy(model)
    step, _ = recorded(loss_of(model), model)
    return step, losses(step, model, batches), losses(loss_of(plain), plain, batches)


def test_packed_sequences_of_any_lengths() -> None:
    """Masks follow from each batch. A loop that took a row for one sequence would have other losses."""
    batches = [batch(seed, *starts) for seed, starts in enumerate([(4,), (4, 7), (1,), (6,), (2, 3, 9), (11,)])]
    step, found, expected = both(batches)
    assert step.num_recordings == 1 and found == expected
    _, whole, _ = both([batch(seed) for seed in range(6)])
    assert all(a != b for a, b in zip(found, whole, strict=True))


@pytest.mark.parametrize("recorded_before", [False, True])
def test_packed_sequences_behind_others_are_an_error(recorded_before: bool) -> None:
    model = model_of()
    step, _ = recorded(loss_of(model), model, warmup_steps=2)
    whole = batch(0) | {"position_ids": torch.arange(LENGTH).expand(ROWS, -1).contiguous()}
    for _ in range(4 if recorded_before else 1):
        step(whole)
        model.zero_grad()
    assert step.num_recordings == recorded_before
    with pytest.raises(RecordingError, match="packed sequences"):
        step(batch(1, 5))


def test_packed_sequences_behind_others_may_go_on_unrecorded(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of()
    compute = loss_of(model)
    step, _ = recorded(compute, model, on_error="warn")
    whole = batch(0) | {"position_ids": torch.arange(LENGTH).expand(ROWS, -1).contiguous()}
    for _ in range(4):
        step(whole)
        model.zero_grad()
    with caplog.at_level(logging.WARNING):
        step(batch(1, 5))
    assert "across sequences" in caplog.text
    model.zero_grad()
    assert step(batch(1, 5)).item() == compute(batch(1, 5)).item()


def test_a_forward_that_asks_more_often_looks_itself() -> None:
    """Its wait for the GPU is then an error of the recording."""
    model = model_of()
    times = 1

    def compute(tokens: Tensor) -> Tensor:
        for _ in range(times):
            loss: Tensor = model(input_ids=tokens, labels=tokens).loss
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    step, _ = recorded(compute, model, warmup_steps=3)
    step(batch(0)["input_ids"])
    model.zero_grad()
    times = 2
    with Waits() as waits:
        step(batch(1)["input_ids"])
    assert waits.places


def padded(seed: int, *lengths: int) -> dict[str, Tensor]:
    """Rows of these lengths."""
    mask = torch.arange(LENGTH)[None] < torch.tensor(lengths)[:, None]
    return {**batch(seed), "attention_mask": mask.long()}


def bert_of() -> torch.nn.Module:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model: torch.nn.Module = transformers.BertForMaskedLM(
        transformers.BertConfig(
            **shape, **dropout, vocab_size=VOCAB, max_position_embeddings=LENGTH, attn_implementation="sdpa"
        )
    )
    return model


@pytest.mark.parametrize("make", [model_of, bert_of])
@pytest.mark.parametrize("first", [(LENGTH, LENGTH), (7, 12)])
def test_padding_of_each_batch(
    make: Callable[[], torch.nn.Module], first: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the first batch has. Attention with a mask that masks nothing rounds as attention with one."""
    lengths = [first, (12, 12), (3, 12), (5, 6), (12, 1), (9, 9)]
    batches = [padded(seed, *each) for seed, each in enumerate(lengths)]
    model = make().double()
    plain = copy.deepcopy(model)
    step, recorder = recorded(loss_of(model), model)
    found = losses(step, model, batches)
    assert step.num_recordings == 1 and recorder.num_launches == 4
    assert found == pytest.approx(losses(loss_of(plain), plain, batches), rel=1e-12)
    unmasked = copy.deepcopy(make().double())
    others = losses(loss_of(unmasked), unmasked, [{"input_ids": each["input_ids"]} for each in batches])
    assert all(abs(a - b) > 1e-9 for a, b in zip(found[2:], others[2:], strict=True))
    warnings = [record for record in caplog.records if "masks nothing" in record.message]
    assert len(warnings) == (first == (LENGTH, LENGTH))


def test_a_compiled_model_is_compiled_once() -> None:
    from torch._dynamo.testing import CompileCounter

    torch.compiler.reset()
    counter = CompileCounter()
    model = model_of()
    compiled: Any = torch.compile(model, backend=counter)
    counts = []

    def compute(each: dict[str, Tensor]) -> Tensor:
        loss: Tensor = compiled(**each, labels=each["input_ids"]).loss
        loss.backward()  # type: ignore[no-untyped-call]
        counts.append(counter.frame_count)
        return loss

    step, _ = recorded(compute, model, warmup_steps=3)
    losses(step, model, [batch(seed) for seed in range(6)])
    assert step.num_recordings == 1 and counts[0] > 0 and len(set(counts)) == 1, counts


class Waits(TorchDispatchMode):
    """Where transformers reads a value of a tensor, for which the host would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (aten._local_scalar_dense, aten.is_nonzero, aten.nonzero, aten.equal):
            libraries = [frame for frame in traceback.extract_stack() if "/transformers/" in frame.filename]
            self.places += [f"{frame.filename}:{frame.lineno}" for frame in libraries[-1:]]
        return func(*args, **(kwargs or {}))


LLAMA_SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
BART_SHAPE = {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "encoder_layers": 1, "decoder_layers": 1}
OPT_SHAPE = {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
GPT2_SHAPE = {"n_embd": 32, "n_layer": 2, "n_head": 2, "pad_token_id": 3, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": ("GPT2Config", {**GPT2_SHAPE, "attn_pdrop": 0.0}),
    "LlamaForCausalLM": ("LlamaConfig", LLAMA_SHAPE),
    "MistralForCausalLM": ("MistralConfig", {**LLAMA_SHAPE, "num_key_value_heads": 1, "sliding_window": 5}),
    "Qwen3ForCausalLM": ("Qwen3Config", {**LLAMA_SHAPE, "num_key_value_heads": 1, "head_dim": 16}),
    "OPTForCausalLM": ("OPTConfig", {**OPT_SHAPE, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "ModernBertForMaskedLM": ("ModernBertConfig", {**LLAMA_SHAPE, "pad_token_id": 0}),
    "BartForConditionalGeneration": ("BartConfig", {**BART_SHAPE, "dropout": 0.0}),
}


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_no_call_but_the_first_waits(kind: str, masks: bool) -> None:
    torch.manual_seed(0)
    config, shape = KINDS[kind]
    model: torch.nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**shape, vocab_size=VOCAB))
    model.config.use_cache = False  # type: ignore[union-attr]
    plain = copy.deepcopy(model)
    batches = [padded(seed, 5, 9) if masks else batch(seed) for seed in range(5)]
    step, _ = recorded(loss_of(model), model)
    found = losses(step, model, batches[:1])
    with Waits() as waits:
        found += losses(step, model, batches[1:])
    assert step.num_recordings == 1 and not waits.places, waits.places
    assert found == pytest.approx(losses(loss_of(plain), plain, batches), rel=1e-5)
