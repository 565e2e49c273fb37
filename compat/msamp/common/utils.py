"""Not provided: MS-AMP's internals (devices, process groups, logging, wrapped functions of Transformer Engine)."""

from ..refusals import not_provided

raise not_provided(__name__, "it holds MS-AMP's own internals; torch.distributed and logging have what loops need")
