"""What this package needs of megatron-core's inside: what megatron-core does not promise, and what versions differ in.

`check` runs when the package is imported, before a missing name could raise an error that names no version. A later
version that lacks one, or renames an argument, then shows here first.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import megatron.core

from ..errors import UserError

#: The versions that have all of it, as pyproject.toml has them.
REQUIREMENT = "megatron-core>=0.16.1,<0.20"

#: Module of megatron-core → name → arguments that are given, or taken by a method that replaces it.
Needed = Mapping[str, Mapping[str, str]]

NEEDED: Needed = {
    "datasets.blended_dataset": {"BlendedDataset._build_indices": ""},
    "datasets.gpt_dataset": {"GPTDataset._build_document_sample_shuffle_indices": ""},
    "distributed.data_parallel_base": {"_BaseDataParallel": "config module"},
    "models.gpt": {
        "GPTModel": "pg_collection vp_stage rope_scaling rope_scaling_factor seq_len_interpolation_factor",
        "GPTModel._postprocess": "hidden_states labels",
        "GPTModel.compute_language_model_loss": "labels logits",
        "GPTModel.shared_embedding_or_output_weight": "",
    },
    "pipeline_parallel.p2p_communication": {
        "P2PCommunicator._communicate": "tensor_send_next tensor_send_prev recv_prev recv_next tensor_shape",
        "_batched_p2p_ops": "tensor_send_prev tensor_recv_prev tensor_send_next tensor_recv_next group",
        "_p2p_ops": "tensor_send_prev tensor_recv_prev tensor_send_next tensor_recv_next group",
    },
    "pipeline_parallel.schedules": {
        "forward_step": "forward_step_func data_iterator model num_microbatches input_tensor forward_data_store config "
        "cp_group_size current_microbatch"
    },
    "pipeline_parallel.utils": {"is_vp_first_stage": "vp_stage vp_size", "is_vp_last_stage": "vp_stage vp_size"},
    "tensor_parallel.layers": {
        "ColumnParallelLinear": "gather_output skip_weight_param_allocation tp_group",
        "ColumnParallelLinear._forward_impl": "input weight",
        "RowParallelLinear._forward_impl": "input weight",
        "set_defaults_if_not_set_tensor_model_parallel_attributes": "tensor",
    },
    "tensor_parallel.random": {
        "_CUDA_RNG_STATE_TRACKER": "",
        "_CUDA_RNG_STATE_TRACKER_INITIALIZED": "",
        "_get_cuda_rng_state": "",
        "_set_cuda_rng_state": "",
        "convert_cuda_rng_state": "",
        "get_all_rng_states": "",
        "is_graph_safe_cuda_rng_tracker": "",
        "model_parallel_cuda_manual_seed": "seed use_cudagraphable_rng tp_rank ep_rank etp_rank force_reset_rng",
    },
    "transformer.attention": {
        "SelfAttention.get_query_key_value_tensors": "hidden_states",
        "SelfAttention._checkpointed_attention_forward": "query key value attention_mask attn_mask_type",
    },
    "transformer.mlp": {"MLP": "submodules ffn_hidden_size tp_group"},
    "transformer.transformer_block": {
        "TransformerBlockSubmodules": "layer_specs layer_norm",
        "get_num_layers_to_build": "config vp_stage pp_rank",
    },
    "transformer.transformer_layer": {
        "TransformerLayer": "config submodules pg_collection",
        "TransformerLayer._forward_attention": "hidden_states attention_mask context rotary_pos_emb packed_seq_params",
        "TransformerLayer._forward_mlp": "hidden_states",
        "get_transformer_layer_offset": "config vp_stage pp_rank",
    },
    "transformer.utils": {"is_layer_window_attention": "window_size window_attn_skip_freq layer_number"},
    "utils": {"get_model_config": "model", "make_viewless_tensor": "inp requires_grad keep_graph"},
}


def check(needed: Needed = NEEDED) -> None:
    """Look for everything that is needed.

    Args:
        needed: of a kind of model, beside what every model needs.

    Raises:
        UserError: names the installed version and what it lacks.
    """
    for module, names in needed.items():
        for name, arguments in names.items():
            lacking = _lacking(f"megatron.core.{module}", name, arguments)
            if lacking is not None:
                raise UserError(
                    f"megatron-core {megatron.core.__version__} has no {lacking}, which fp8_megatron needs; "
                    f"pip install '{REQUIREMENT}'"
                )


def _lacking(module: str, name: str, arguments: str) -> str | None:
    """What a module does not have: a name, or an argument of it."""
    try:
        found: Any = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return f"{module}.{name}"
    taken = inspect.signature(found).parameters if arguments else ()
    missing = [argument for argument in arguments.split() if argument not in taken]
    return f"argument {missing[0]} of {module}.{name}" if missing else None


def quiet() -> None:
    """Keep back the advice to build a HybridModel, which 0.19 gives for every GPTModel."""
    logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)


def without_cuda_graphs() -> dict[str, Any]:
    """What a `TransformerConfig` is given for layers that megatron-core records no graphs of. Its defaults warn."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    names = ("cuda_graph_modules", "cuda_graph_scope")  # of 0.19, of 0.16
    return {next(name for name in names if name in TransformerConfig.__dataclass_fields__): []}
