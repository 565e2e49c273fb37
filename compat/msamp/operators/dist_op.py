"""Not provided: collectives of an NCCL that is not public."""

from ..refusals import not_provided

raise not_provided(
    __name__, "it wraps an NCCL that is not public; fp8_megatron.collectives reduces FP8 on torch's own NCCL and gloo"
)
