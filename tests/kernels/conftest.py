"""With TRITON_INTERPRET=1 the tests of Triton kernels for a GPU run on a CPU, many times slower."""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.harness import interpreted_gpu

    interpreted_gpu.install()
