"""The section ``parallel`` of the configuration: how ranks share the work (`schema` says how fields become flags)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from ..storage import GradReduceMode
from .fields import Count, Layers, Minutes, NumRanks

#: The settings that divide layers over stages.
PIPELINE_SETTINGS = (
    "pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "microbatch_group_size_per_virtual_pipeline_stage",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
)
#: The settings that say how many ranks share a layer, in the order of `LayerShares`.
LAYER_SHARES = ("tensor_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size")


class LayerShares(NamedTuple):
    """How many ranks share a layer.

    Attributes:
        weight: share a weight [N, K].
        matrices: share the matrices of a weight [M, N, K].
        matrix: share each of these.
    """

    weight: int
    matrices: int
    matrix: int


def layer_shares(settings: Mapping[str, Any]) -> LayerShares:
    """From settings by name, as Megatron's arguments are, with the defaults filled in."""
    weight, matrices, matrix = (settings.get(name) for name in LAYER_SHARES)
    return LayerShares(weight or 1, matrices or 1, matrix or weight or 1)


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is split over ranks. Data-parallel size: WORLD_SIZE / (tensor × context × pipeline size)."""

    tensor_model_parallel_size: NumRanks = 1
    """Ranks that share each layer."""
    context_parallel_size: NumRanks = 1
    """Ranks that share each sequence. They hold the same weights, and exchange keys and values in attention."""
    cp_comm_type: Literal["p2p", "all_gather", "a2a"] = "p2p"
    """How context-parallel ranks exchange keys and values. p2p: in a ring, one rank at a time. all_gather: all at once,
    which takes more memory. a2a: each rank computes some heads over whole sequences."""
    expert_model_parallel_size: NumRanks = 1
    """Data- and context-parallel ranks that share the experts of a layer."""
    expert_tensor_parallel_size: NumRanks | None = None
    """Ranks that share each expert. Default: tensor-model-parallel-size."""
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = "allgather"
    """How expert-parallel ranks exchange tokens. allgather: each gets all, and steps can be recorded as CUDA graphs.
    alltoall, flex: a token goes to the ranks of its experts, and the host waits for the numbers of tokens."""
    overlap_moe_expert_parallel_comm: bool = False
    """Run the forward of the next micro-batch while a backward waits for tokens of experts, and the other way round.
    Takes the activations of one more layer, or of a third of the layers with --recompute-modules moe."""
    pipeline_model_parallel_size: NumRanks = 1
    """Pipeline stages that share the layers."""
    num_layers_per_virtual_pipeline_stage: Layers | None = None
    """Layers of one virtual stage. Turns on the interleaved schedule."""
    num_virtual_stages_per_pipeline_rank: Layers | None = None
    """Virtual stages of one rank, instead of the layers of one. Two or more turn on the interleaved schedule."""
    microbatch_group_size_per_virtual_pipeline_stage: Count | None = None
    """Consecutive micro-batches of a virtual stage in the interleaved schedule. Default: the number of stages."""
    decoder_first_pipeline_num_layers: Layers | None = None
    """Layers of the first stage. The other stages share the rest evenly."""
    decoder_last_pipeline_num_layers: Layers | None = None
    """Layers of the last stage. The other stages share the rest evenly."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as a layer of the first stage, which then has one layer less."""
    account_for_loss_in_pipeline_split: bool = False
    """Count the output layer and the loss as a layer of the last stage, which then has one layer less."""
    pipeline_model_parallel_layout: str | None = None
    """Every stage in Megatron's notation, instead of the flags above: E embedding, t layer, L loss, | next stage, *
    repetition (Ettt|(tttt|)*2,tttL). More stages than --pipeline-model-parallel-size are virtual stages."""
    use_tp_pp_dp_mapping: bool = False
    """On: ranks are numbered along tensor, context, pipeline and then data parallel, so that the stages of a replica
    are neighbours; the ranks of experts, expert-tensor × expert, are as many as tensor × context. Off: along data
    parallel before pipeline."""
    sequence_parallel: bool = False
    """Shard norms, dropouts and residuals over the sequence inside a tensor-parallel group."""
    overlap_grad_reduce: bool = True
    """On: reduce gradients bucket by bucket during backward. Turn off only to measure what the overlap hides."""
    overlap_param_gather: bool = True
    """On: gather updated weights during the next forward. Turn off only to measure what the overlap hides."""
    ddp_bucket_size: Count = 40_000_000
    """Elements of a bucket, which is reduced or gathered at once. Rounded to suit the number of ranks."""
    fp8_grad_reduce: GradReduceMode = GradReduceMode.ALL_TO_ALL
    """How FP8 gradients are summed. all_to_all: exact FP32 sum. hierarchical: the same inside each node, then across
    nodes. nccl: native FP8 sum with FP8-LM's auto-scaling, for comparison."""
    fp8_wire_intra: Literal["bf16", "fp8"] = "bf16"
    """Dtype in which ranks of a node send gradients with --fp8-grad-reduce hierarchical. Between nodes it is FP8."""
    dp_transport: Literal["auto", "nccl", "copy_engine"] = "auto"
    """Transport of gradients and weights between data-parallel ranks. nccl: NCCL. copy_engine: GPUs of one node copy
    from each other without using multiprocessors. auto: copy_engine inside a node if it works, otherwise nccl."""
    tp_transport: Literal["auto", "nccl", "copy_engine"] = "auto"
    """Transport of activations between tensor-parallel ranks in FP8 layers with --sequence-parallel. nccl: NCCL.
    copy_engine: each GEMM runs in parts while the next part is copied. auto: copy_engine if it works, for two ranks
    of a node, or for up to four if steps are recorded as CUDA graphs; otherwise nccl."""
    nccl_communicator_config_path: str | None = None
    """YAML file of NCCL settings for each process group, in megatron-core's format. Example: {dp_cp: {max_ctas: 8}}
    limits the multiprocessors that data-parallel collectives use during GEMMs."""
    distributed_timeout_minutes: Minutes = 10.0
    """Time limit of a collective. The job ends if one takes longer."""

    @property
    def ranks_per_sample(self) -> int:
        """Ranks that work on one sample: tensor × context × pipeline."""
        return self.tensor_model_parallel_size * self.context_parallel_size * self.pipeline_model_parallel_size

    @property
    def expert_tensor_size(self) -> int:
        """Ranks that share each expert, with the default filled in."""
        size = self.expert_tensor_parallel_size
        return self.tensor_model_parallel_size if size is None else size

    @property
    def rank_order(self) -> str:
        """In which order ranks are numbered, the fastest first, in megatron-core's words."""
        return "tp-cp-ep-pp-dp" if self.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp"

    def first_rank_of(self, stage: int, world_size: int) -> int:
        """The first rank of a pipeline stage."""
        return stage * self._ranks_before_the_next_stage(world_size)

    def stage_of(self, rank: int, world_size: int) -> int:
        """The pipeline stage of a rank."""
        return rank // self._ranks_before_the_next_stage(world_size) % self.pipeline_model_parallel_size

    def _ranks_before_the_next_stage(self, world_size: int) -> int:
        if self.use_tp_pp_dp_mapping:
            return self.tensor_model_parallel_size * self.context_parallel_size
        return world_size // self.pipeline_model_parallel_size

    @property
    def overlaps_micro_batches(self) -> bool:
        """Whether a backward takes turns with the forward of the next micro-batch."""
        return self.overlap_moe_expert_parallel_comm

    @property
    def matrix_holders(self) -> int:
        """Ranks that share a weight [M, N, K], such as the experts of a layer: expert-tensor × expert."""
        return self.expert_tensor_size * self.expert_model_parallel_size

    @property
    def gathers_tokens(self) -> bool:
        """Whether each rank that shares the experts of a layer gets all tokens, and not those of its experts alone."""
        return self.moe_token_dispatcher_type == "allgather" or self.expert_model_parallel_size == 1

    @property
    def exchanges_heads(self) -> bool:
        """Whether context-parallel ranks exchange their parts of a sequence for heads."""
        return self.context_parallel_size > 1 and self.cp_comm_type == "a2a"

    @property
    def sequence_shares(self) -> int:
        """Parts of a sequence on tensor-parallel ranks, outside of attention and MLPs: one without sequence
        parallelism."""
        return self.tensor_model_parallel_size if self.sequence_parallel else 1

    def with_stages(self, size: int) -> ParallelConfig:
        """These settings with `size` even pipeline stages and the plain 1F1B schedule."""
        defaults = ParallelConfig()
        changed = {name: getattr(defaults, name) for name in PIPELINE_SETTINGS}
        return replace(self, **{**changed, "pipeline_model_parallel_size": size})
