"""Masks that attention does not need are left out, in compiled models of transformers too, and no others."""

from __future__ import annotations

import pickle
import threading
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fp8_megatron
from fp8_megatron.any_model.left_out_masks import leave_out_masks

transformers = pytest.importorskip("transformers")

ROWS, LENGTH, VOCAB = 2, 32, 64
DECODER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "pad_token_id": 0,
}
#: Of the kinds' configurations, what differs.
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {**DECODER, "use_cache": False},
    "gemma3_text": {**DECODER, "use_cache": False, "sliding_window": 64},
    "llama": DECODER,  # which makes a cache
    "gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": VOCAB, "use_cache": False},
}


def model_of(kind: str, **more: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**KINDS[kind], **more}, attn_implementation="sdpa")
    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model.eval()


def initialized(model: torch.nn.Module) -> torch.nn.Module:
    return fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters()))[0]


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(1, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))


def packed(*starts: int) -> Tensor:
    """Positions of rows in which sequences begin at `starts`, too."""
    positions = torch.cat([torch.arange(end - start) for start, end in pairwise([0, *starts, LENGTH])])
    return positions.expand(ROWS, -1).contiguous()


class Compiled:
    """A compiled model, and whether its calls of attention have a mask."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.have_masks: list[bool] = []
        self._model = torch.compile(model, backend=self._keep, fullgraph=True)

    def __call__(self, *args: Any, **named: Any) -> Any:
        torch.compiler.reset()
        self.have_masks.clear()
        return self._model(*args, **named)

    def _keep(self, graph: torch.fx.GraphModule, _: Any) -> Any:
        nodes = [node for node in graph.graph.nodes if "scaled_dot_product_attention" in str(node.target)]
        self.have_masks += [node.kwargs["attn_mask"] is not None for node in nodes]
        return graph.forward


@pytest.mark.parametrize("kind", KINDS)
def test_a_causal_model_writes_no_mask(kind: str) -> None:
    model = initialized(model_of(kind))
    compiled = Compiled(model)
    torch.testing.assert_close(compiled(tokens()).logits, model(tokens()).logits)
    assert compiled.have_masks == [False]


@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_a_bidirectional_model_writes_no_mask(kind: str) -> None:
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    if kind == "bert":
        config = transformers.BertConfig(**shape, vocab_size=VOCAB, attn_implementation="sdpa")
        model, x = transformers.BertForMaskedLM(config), tokens()
    else:
        config = transformers.ViTConfig(**shape, image_size=32, attn_implementation="sdpa")
        model, x = transformers.ViTForImageClassification(config), torch.randn(ROWS, 3, 32, 32)
    model = initialized(model.eval())
    compiled = Compiled(model)
    torch.testing.assert_close(compiled(x).logits, model(x).logits)
    assert compiled.have_masks == [False]
    if kind == "bert":
        mask = torch.ones_like(x)
        mask[:, 20:] = 0
        torch.testing.assert_close(compiled(x, attention_mask=mask).logits, model(x, attention_mask=mask).logits)
        assert compiled.have_masks == [True]


@pytest.mark.parametrize(("kind", "by_name"), [("qwen3", True), ("gemma3_text", False), ("gpt2", False)])
def test_packed_sequences_stay_apart(kind: str, by_name: bool) -> None:
    """Positions that the caller gives are looked at; in a graph their mask is written."""
    model = initialized(model_of(kind))
    given: tuple[tuple[Any, ...], dict[str, Any]] = ((tokens(),), {"position_ids": packed(10, 17)})
    if not by_name:
        others = 3 if kind == "gpt2" else 1  # arguments between tokens and positions
        given = ((tokens(), *(None,) * others, packed(10, 17)), {})
    args, named = given
    compiled = Compiled(model)
    expected = model(*args, **named).logits
    torch.testing.assert_close(compiled(*args, **named).logits, expected)
    assert compiled.have_masks == [True]
    assert not torch.allclose(expected[:, 20], model(tokens(), position_ids=packed()).logits[:, 20])


def test_padding_and_windows_keep_their_masks() -> None:
    mask = torch.ones_like(tokens())
    mask[0, :9] = 0
    model = initialized(model_of("qwen3"))
    compiled = Compiled(model)
    ours, expected = (each(tokens(), attention_mask=mask).logits for each in (compiled, model))
    torch.testing.assert_close(ours[1], expected[1])
    torch.testing.assert_close(ours[0, 9:], expected[0, 9:])
    assert compiled.have_masks == [True]
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    model = initialized(model_of("gemma3_text", sliding_window=8, **layers))
    compiled = Compiled(model)
    torch.testing.assert_close(compiled(tokens()).logits, model(tokens()).logits)
    assert compiled.have_masks == [True, False]


class Looks(TorchDispatchMode):
    """Counts values that the host reads."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), named: Any = None) -> Any:
        self.count += operator is torch.ops.aten._local_scalar_dense.default
        return operator(*args, **(named or {}))


def test_the_host_reads_no_positions_unless_there_are_some() -> None:
    plain = model_of("qwen3")
    model = initialized(model_of("qwen3"))
    for each, named, expected in (
        (model, {}, 0),
        (model, {"position_ids": packed(7)}, 1),
        (plain, {}, 1),
    ):
        with Looks() as looks:
            each.model(tokens(), **named)
        assert looks.count == expected


@pytest.mark.parametrize("error", [IndexError, KeyboardInterrupt])
def test_a_failed_call_leaves_nothing_behind(error: type[BaseException]) -> None:
    """Another model of the process, which `initialize` has not seen, looks at its positions."""
    model, other = initialized(model_of("qwen3")), model_of("qwen3")
    expected = other(tokens(), position_ids=packed(10)).logits

    def fail(*_: Any) -> None:
        raise error

    hook = model.model.norm.register_forward_hook(fail)
    with pytest.raises(error):
        model(tokens())
    hook.remove()
    assert torch.equal(other(tokens(), position_ids=packed(10)).logits, expected)
    torch.testing.assert_close(Compiled(other)(tokens(), position_ids=packed(10)).logits, expected)


def test_a_call_in_another_thread_says_nothing_of_this_one() -> None:
    model, other = initialized(model_of("qwen3")), model_of("qwen3")
    expected = other(tokens(), position_ids=packed(10)).logits
    found: list[Tensor] = []

    def call_other(*_: Any) -> None:
        found.append(other(tokens(), position_ids=packed(10)).logits)

    def in_a_thread(*_: Any) -> None:
        thread = threading.Thread(target=call_other)
        thread.start()
        thread.join()

    model.model.embed_tokens.register_forward_pre_hook(in_a_thread)
    model(tokens())
    assert torch.equal(found[0], expected)


def test_hooks_are_made_once_and_can_be_pickled() -> None:
    model = initialized(model_of("qwen3"))
    leave_out_masks(model)
    assert [len(each._forward_pre_hooks) for each in (model, model.model)] == [1, 1]
    hooks = [*model._forward_pre_hooks.values(), *model._forward_hooks.values()]
    assert pickle.loads(pickle.dumps(hooks)) == hooks
