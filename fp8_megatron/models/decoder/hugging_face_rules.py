"""Maps between weights of this project's model ("ours") and of Hugging Face's GPT-2, Llama and its kin ("theirs").

Each weight of ours has a `Rule`. The layouts differ as follows:

- QKV: ours is one weight, query group by query group: the group's query heads, its key head, its value head. Llama
  has three weights; GPT-2 has one, all queries before all keys before all values.
- GPT-2's linear layers are ``Conv1D``: [in, out], the transpose of ours.
- SwiGLU: ours stacks gate over up ([2 · ffn, hidden]); Llama has two weights.
- RoPE: both rotate the two halves of a head against each other (not interleaved pairs), so heads are copied.
- Llama's attention has biases of both QKV and projection, or none. If ours has QKV biases only, the projection's are
  zero in theirs; non-zero ones are refused. Qwen2 has QKV biases alone.
- Qwen3 has norms of query and key heads, gpt-oss a sink for each head. The rest of Mistral, Qwen2 and Qwen3 is Llama's.
- A tied head is stored once, as the embedding. Only ours pads the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...config.model import ModelConfig
from ...errors import CheckpointError
from ..hugging_face import Family, Rule
from ..keys import ATTENTION_NORM, MLP_NORM, OUTPUT_LAYER, POSITION_EMBEDDING, WORD_EMBEDDING
from .table import (
    FC1,
    FC2,
    FINAL_NORM,
    KEY_NORM,
    PROJECTION,
    QKV,
    QUERY_NORM,
    SINKS,
)

GPT2 = Family("gpt2", layers="transformer.h.", prefix="transformer.", has_linear_modules=False)
LLAMA, MISTRAL, QWEN2, QWEN3 = map(Family, ("llama", "mistral", "qwen2", "qwen3"))
#: Outside its MLPs, which another architecture adds.
GPT_OSS = Family("gpt_oss", has_linear_modules=False)


@dataclass(frozen=True)
class Heads:
    """The heads in a QKV weight of `groups` × (`queries` query heads, a key head, a value head) × `dim` rows."""

    groups: int
    queries: int
    dim: int

    @classmethod
    def of(cls, model: ModelConfig) -> Heads:
        """The heads of a model."""
        return cls(model.query_groups, model.num_attention_heads // model.query_groups, model.head_dim)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """q [groups·queries·dim, …], k and v [groups·dim, …] → [groups·(queries + 2)·dim, …]."""
        return torch.cat([_unflatten(part, self.groups) for part in parts], dim=1).flatten(0, 1)

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The inverse of `join`."""
        sizes = (self.queries * self.dim, self.dim, self.dim)
        query, key, value = _unflatten(qkv, self.groups).split(sizes, dim=1)
        return query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)


def _unflatten(tensor: Tensor, groups: int) -> Tensor:
    return tensor.reshape(groups, tensor.shape[0] // groups, *tensor.shape[1:])


def join_gate_and_up(parts: Sequence[Tensor]) -> Tensor:
    """gate [ffn, …], up [ffn, …] → [2·ffn, …]: the order of megatron-core's gated MLP."""
    return torch.cat(list(parts))


def split_gate_and_up(weight: Tensor) -> tuple[Tensor, ...]:
    """The inverse of `join_gate_and_up`."""
    return weight.chunk(2)


def rules_of(family: Family, model: ModelConfig, vocab_size: int) -> list[Rule]:
    """The rules of every weight, in the order of the forward pass.

    Args:
        vocab_size: rows without padding, which theirs keep. `join` gives a vocabulary without padding.
    """
    if family is GPT2:
        return _gpt2_rules(model, vocab_size)
    return llama_rules(family, model, vocab_size, gated_rules(model, FC1, FC2, "mlp"))


def _vocabulary_rule(key: str, name: str, vocab_size: int) -> Rule:
    return Rule(key, (name,), split=lambda weight: (weight[:vocab_size],))


def _norm_rules(key_prefix: str, name_prefix: str, parts: Sequence[str]) -> list[Rule]:
    return [Rule(key_prefix + part, (f"{name_prefix}.{part}",)) for part in parts]


def _with_multipliers(rules: Sequence[Rule], model: ModelConfig) -> list[Rule]:
    """The rules, with muP's multipliers of embedding and logits in the weights that go to theirs, which has none. Those
    are powers of two (`hugging_face_config`), so that no bit of a weight is lost."""
    factors = {
        **dict.fromkeys((WORD_EMBEDDING, POSITION_EMBEDDING), model.embedding_mult),
        **dict.fromkeys((FINAL_NORM + "weight", FINAL_NORM + "bias"), model.output_mult),
    }
    return [rule if factors.get(rule.key, 1.0) == 1.0 else _multiplied(rule, factors[rule.key]) for rule in rules]


def _multiplied(rule: Rule, factor: float) -> Rule:
    return replace(rule, split=lambda weight: tuple(part * factor for part in rule.split(weight)))


def _gpt2_rules(model: ModelConfig, vocab_size: int) -> list[Rule]:
    """Of GPT-2. Its ``Conv1D`` has weights [in, out]; its query, key and value are one tensor."""
    heads, layer, both = Heads.of(model), "transformer.h.{}.", ("weight", "bias")

    def linear(key_prefix: str, name: str) -> list[Rule]:
        return [
            Rule(key_prefix + "weight", (f"{layer}{name}.weight",), lambda w: w[0].t(), lambda w: (w.t(),)),
            Rule(key_prefix + "bias", (f"{layer}{name}.bias",)),
        ]

    qkv = [
        Rule(
            QKV + "weight",
            (f"{layer}attn.c_attn.weight",),
            lambda w: heads.join(w[0].t().chunk(3)),
            lambda w: (torch.cat(heads.split(w)).t(),),
        ),
        Rule(
            QKV + "bias",
            (f"{layer}attn.c_attn.bias",),
            lambda b: heads.join(b[0].chunk(3)),
            lambda b: (torch.cat(heads.split(b)),),
        ),
    ]
    rules = [
        _vocabulary_rule(WORD_EMBEDDING, "transformer.wte.weight", vocab_size),
        Rule(POSITION_EMBEDDING, ("transformer.wpe.weight",)),
        *_norm_rules(ATTENTION_NORM, f"{layer}ln_1", both),
        *qkv,
        *linear(PROJECTION, "attn.c_proj"),
        *_norm_rules(MLP_NORM, f"{layer}ln_2", both),
        *linear(FC1, "mlp.c_fc"),
        *linear(FC2, "mlp.c_proj"),
        *_norm_rules(FINAL_NORM, "transformer.ln_f", both),
    ]
    if model.untie_embeddings_and_output_weights:
        rules.append(_vocabulary_rule(OUTPUT_LAYER, "lm_head.weight", vocab_size))
    return _with_multipliers(rules, model)


def _linear_rules(model: ModelConfig, key_prefix: str, modules: Sequence[str], *functions: Callable) -> list[Rule]:
    """Of a linear layer in the layers of Llama and its kin."""
    return [
        Rule(key_prefix + part, tuple(f"model.layers.{{}}.{module}.{part}" for module in modules), *functions)
        for part in (("weight",) if model.disable_bias_linear else ("weight", "bias"))
    ]


def gated_rules(model: ModelConfig, fc1: str, fc2: str, module: str) -> list[Rule]:
    """Of a gated MLP: their module in a layer, and the beginnings of our keys."""
    gate_and_up = (f"{module}.gate_proj", f"{module}.up_proj")
    return [
        *_linear_rules(model, fc1, gate_and_up, join_gate_and_up, split_gate_and_up),
        *_linear_rules(model, fc2, (f"{module}.down_proj",)),
    ]


def llama_rules(family: Family, model: ModelConfig, vocab_size: int, mlp: Sequence[Rule]) -> list[Rule]:
    """Of Llama and its kin with the rules `mlp` behind attention and its norm."""
    heads, layer, has_bias = Heads.of(model), "model.layers.{}.", not model.disable_bias_linear

    def join_qkv_bias(parts: Sequence[Tensor]) -> Tensor:
        *qkv, projection = parts
        if projection.any():
            raise CheckpointError(
                f"config.json: attention_bias(True) without mlp_bias is supported where every self_attn.o_proj.bias is "
                f"zero (add_qkv_bias), but one is not (|x| up to {projection.abs().max():.1e}); only models with all "
                f"biases, none, or those of QKV alone convert"
            )
        return heads.join(qkv)

    def split_qkv_bias(bias: Tensor) -> tuple[Tensor, ...]:
        return (*heads.split(bias), bias.new_zeros(model.hidden_size))

    projections = [f"self_attn.{name}_proj" for name in "qkv"]
    qkv_bias: list[Rule] = []
    if model.add_qkv_bias and not has_bias:
        names = tuple(f"{layer}{name}.bias" for name in projections)
        qkv_bias = [Rule(QKV + "bias", names, heads.join, heads.split)]
        if family is not QWEN2:  # theirs has a bias of the output projection too; it is zero
            names = (*names, f"{layer}self_attn.o_proj.bias")
            qkv_bias = [Rule(QKV + "bias", names, join_qkv_bias, split_qkv_bias, refuses=True)]
    head_norms = [
        rule
        for prefix, name in ((QUERY_NORM, "q_norm"), (KEY_NORM, "k_norm"))
        for rule in _norm_rules(prefix, f"{layer}self_attn.{name}", ("weight",) if model.qk_layernorm else ())
    ]
    rules = [
        _vocabulary_rule(WORD_EMBEDDING, "model.embed_tokens.weight", vocab_size),
        *_norm_rules(ATTENTION_NORM, f"{layer}input_layernorm", ("weight",)),
        *_linear_rules(model, QKV, projections, heads.join, heads.split),
        *qkv_bias,
        *head_norms,
        *([Rule(SINKS, (f"{layer}self_attn.sinks",))] if model.softmax_type == "learnable" else []),
        *_linear_rules(model, PROJECTION, ("self_attn.o_proj",)),
        *_norm_rules(MLP_NORM, f"{layer}post_attention_layernorm", ("weight",)),
        *mlp,
        *_norm_rules(FINAL_NORM, "model.norm", ("weight",)),
    ]
    if model.untie_embeddings_and_output_weights:
        rules.append(_vocabulary_rule(OUTPUT_LAYER, "lm_head.weight", vocab_size))
    return _with_multipliers(rules, model)
