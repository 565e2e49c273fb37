"""Save a stock GPTModel in BF16 with random weights by megatron-core's own writer, and beside it what they are.

A program of its own: megatron-core's writer starts processes, which a test's rank may not.
"""

import sys
from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from safetensors.torch import save_file

from fp8_megatron.config.io import load_config
from fp8_megatron.mcore.runtime import runtime
from fp8_megatron.mcore.topology import initialized
from fp8_megatron.mcore.transformer_config import transformer_config

NUM_ROWS = 256


def main(config_file: str, folder: str, values: str) -> None:
    """Save the model that a configuration describes, its vocabulary padded to NUM_ROWS."""
    config, device = load_config(config_file), torch.device("cpu")
    with runtime(device), initialized(config.parallel, config.model.num_layers, device):
        module = GPTModel(
            transformer_config(config, device),
            get_gpt_layer_local_spec(normalization=config.model.normalization),
            vocab_size=NUM_ROWS,
            max_sequence_length=config.model.seq_length,
            share_embeddings_and_output_weights=not config.model.untie_embeddings_and_output_weights,
            position_embedding_type=config.model.position_embedding_type,
        )
        generator = torch.Generator().manual_seed(0)
        for param in module.parameters():
            param.data = (0.1 * torch.randn(param.shape, generator=generator)).bfloat16()
        Path(folder).mkdir(parents=True)
        torch.cuda.synchronize = lambda *_: None  # which the writer calls on a CPU as well
        dist_checkpointing.save(module.sharded_state_dict(), folder)
        save_file({name: param.detach().clone() for name, param in module.named_parameters()}, values)


if __name__ == "__main__":
    main(*sys.argv[1:])
