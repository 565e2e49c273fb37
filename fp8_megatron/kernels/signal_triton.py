"""A stream that waits for another GPU's signal, in Triton: one warp reads a counter until it has the value.

A stream's own memory operation waits with no kernel, but the GPU looks at a counter that another GPU writes only now
and then: hundreds of microseconds late, where a layer has several such waits.
"""

# The parameters of a Triton kernel have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["value"])
def _wait_until_reached(counter, value):
    reached = tl.load(counter, volatile=True)
    while reached - value < 0:
        reached = tl.load(counter, volatile=True)


def wait_until_reached(counter: Tensor, value: int) -> None:
    """Hold up the current stream until int32 `counter` [1] has come to `value`, in cyclic order."""
    _wait_until_reached[(1,)](counter, value, num_warps=1)
