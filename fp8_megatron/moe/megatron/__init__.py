"""A mixture of experts in megatron-core's GPT."""

from ...mcore import seams

#: As `mcore.seams.NEEDED`.
NEEDED: seams.Needed = {
    "transformer.moe.moe_utils": {"MoEAuxLossAutoScaler": "", "z_loss_func": "logits z_loss_coeff"},
    "transformer.moe.router": {
        "TopKRouter._apply_aux_loss": "probs scores_for_aux_loss routing_map",
        "TopKRouter._apply_global_aux_loss": "probs scores_for_aux_loss routing_map",
        "TopKRouter._apply_seq_aux_loss": "probs scores_for_aux_loss routing_map seq_length bsz",
        "TopKRouter.is_aux_loss_enabled": "",
        "TopKRouter._maintain_float32_expert_bias": "",
        "TopKRouter.apply_input_jitter": "input",
        "TopKRouter.apply_z_loss": "logits",
        "TopKRouter.attach_and_log_load_balancing_loss": "activation aux_loss_coeff aux_loss aux_loss_name",
        "TopKRouter.get_aux_loss_coeff": "aux_loss_type",
        "TopKRouter.reset_global_aux_loss_tracker": "",
        "TopKRouter.routing": "logits",
        "TopKRouter.sinkhorn_load_balancing": "logits",
    },
}

seams.check(NEEDED)
