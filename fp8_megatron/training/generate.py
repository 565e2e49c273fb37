"""Text from a trained checkpoint, to see what a model has learned. This is not a serving engine."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ..assembly import parts_of
from ..checkpoint.description import read_description
from ..checkpoint.files import CONFIG, META, CheckpointError, candidates, iteration_folder, named_checkpoint
from ..checkpoint.loading import read_weights
from ..checkpoint.manifest import check_files
from ..checkpoint.placement import placement_of
from ..checkpoint.saved_run import saved_config
from ..config.checks import ConfigError
from ..config.schema import Config
from ..config.words import shortened
from ..data.tokenizer import Tokenizer
from ..device import device as devices
from ..dtypes import FP8_GEMM_MULTIPLE
from ..mcore.gpt import build_model
from ..mcore.initialization import named_buffers_of_model, named_parameters_of_model
from ..mcore.runtime import runtime, seed_everything
from ..mcore.topology import Topology, initialized
from .build import build_recipe
from .run_data import load_tokenizer

logger = logging.getLogger(__name__)


def generate_text(
    checkpoint_root: Path, prompts: list[str], *, num_tokens: int, temperature: float, top_k: int, seed: int
) -> list[str]:
    """Continue each prompt. The number of calling ranks must equal the checkpoint's tensor-parallel size.

    Args:
        checkpoint_root: folder that training saved into, for its latest checkpoint, or a folder iter_* of it.
        temperature: of the softmax that tokens are drawn from; 0 takes the most likely token.
        top_k: draw only among this many most likely tokens.

    Returns:
        Each prompt with its continuation, equal on every rank.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
        ConfigError: the number of ranks is not the checkpoint's, the tokenizer cannot read a prompt, or a sampling
            setting is out of range.
    """
    root, iteration = named_checkpoint(checkpoint_root)
    iterations = candidates(root, iteration)
    if not iterations:
        raise CheckpointError(f"no checkpoint under {root}; give the folder that --save named")
    folder = iteration_folder(root, iterations[0])
    check_files(folder, (CONFIG, META))
    config = saved_config(folder)
    parallel = replace(config.parallel.with_stages(1), context_parallel_size=1)
    config = replace(config, parallel=parallel, checkpoint=replace(config.checkpoint, load=None, save=None))
    num_ranks, tp = devices.world_size(), parallel.tensor_model_parallel_size
    if num_ranks != tp:
        raise ConfigError(
            f"the checkpoint has tensor_model_parallel_size({tp}), this run {num_ranks} ranks; start it with torchrun "
            f"--nproc-per-node {tp}"
        )
    if top_k < 1 or temperature < 0:
        raise ConfigError(f"top_k({top_k}) must be 1 or more and temperature({temperature}) 0 or more")
    tokenizer = load_tokenizer(config)
    for prompt in prompts:
        try:
            length = len(tokenizer.encode_beginning(prompt))
        except ValueError as error:
            raise ConfigError(f"prompt {prompt!r}: {error}") from error
        if length > config.model.seq_length:
            seen = config.model.seq_length
            logger.warning("%s: %d tokens, and the model sees the last seq_length(%d)", shortened(prompt), length, seen)
    device = devices.select_device()
    with ExitStack() as stack:
        stack.enter_context(runtime(device))
        topology = stack.enter_context(initialized(config.parallel, config.model.num_layers, device))
        seed_everything(seed, device, tensor_parallel_rank=topology.tp.rank(), pipeline_rank=0)
        model = _load_model(config, folder, topology, device)
        generator = torch.Generator(device).manual_seed(seed)
        sampler = _Sampler(config, model, tokenizer, device, temperature, top_k, generator)
        return [sampler.continue_text(prompt, num_tokens) for prompt in prompts]


@torch.no_grad()
def _load_model(config: Config, folder: Path, topology: Topology, device: torch.device) -> torch.nn.Module:
    padded_vocab_size = read_description(folder)["padded_vocab_size"]
    (chunk,) = build_model(
        config, padded_vocab_size, topology, device, partial(build_recipe, config.precision), parts_of(config)
    )
    held = {**named_parameters_of_model(chunk.module), **named_buffers_of_model(chunk.module)}
    placements = {name: placement_of(name, topology.region_of(own), config.model) for name, own in held.items()}
    for name, value in read_weights(folder, placements):
        held[name].copy_(value.to(device))
    return chunk.module.eval()


class _Sampler:
    """Draws tokens one at a time, each with a full forward pass over the context."""

    def __init__(
        self,
        config: Config,
        model: torch.nn.Module,
        tokenizer: Tokenizer,
        device: torch.device,
        temperature: float,
        top_k: int,
        generator: torch.Generator,
    ) -> None:
        self.model, self.tokenizer, self.device = model, tokenizer, device
        self.temperature, self.top_k, self.generator = temperature, top_k, generator
        self.max_context = config.model.seq_length
        self.last_position = config.model.num_positions - 1
        self.multiple = FP8_GEMM_MULTIPLE * config.parallel.tensor_model_parallel_size

    def continue_text(self, prompt: str, num_tokens: int) -> str:
        """The prompt with up to `num_tokens` more tokens; stops at the end-of-document token."""
        ids = self.tokenizer.encode_beginning(prompt) or [self.tokenizer.eod]
        for _ in range(num_tokens):
            token = self._next_token(ids)
            if token == self.tokenizer.eod:
                break
            ids.append(token)
        return self.tokenizer.decode(ids)

    @torch.no_grad()
    def _next_token(self, ids: list[int]) -> int:
        context = ids[-self.max_context :]
        padded = -(-len(context) // self.multiple) * self.multiple
        tokens = torch.full((1, padded), self.tokenizer.eod, device=self.device)
        tokens[0, : len(context)] = torch.tensor(context, device=self.device)
        # Padding may exceed the position table, so its positions are clamped: causal attention never reads padding.
        positions = torch.arange(padded, device=self.device).clamp(max=self.last_position)[None]
        logits = self.model(tokens, positions, None, runtime_gather_output=True)
        return self._draw(logits[0, len(context) - 1, : self.tokenizer.vocab_size].float())

    def _draw(self, logits: Tensor) -> int:
        if self.temperature == 0.0:
            return int(logits.argmax())
        best, index = logits.topk(min(self.top_k, logits.numel()))
        choice = torch.multinomial(torch.softmax(best / self.temperature, dim=0), 1, generator=self.generator)
        return int(index[choice])
