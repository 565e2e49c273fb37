"""torch's DDP: the optimizer reduces FP8 gradients."""

from torch.nn.parallel import DistributedDataParallel as FP8DistributedDataParallel

__all__ = ["FP8DistributedDataParallel"]
