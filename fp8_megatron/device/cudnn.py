"""Which cuDNN this process runs: PyTorch's own, even if another one is installed.

megatron-core imports Transformer Engine if it is installed. Transformer Engine's library is linked to all of cuDNN's
libraries, while PyTorch loads most of them on demand. By default the system's libraries are then loaded first, and
PyTorch runs them. Before 9.15.1, cuDNN's attention backward in a CUDA graph accesses memory out of bounds if the
sequence length is not a multiple of 128 (release notes of cudnn-frontend 1.16.0). On an H200, a system's 9.14.0 gave
NaN gradients or an illegal memory access. PyTorch's 9.19.0 was bitwise correct, and 2 to 4% faster.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

#: Where Transformer Engine looks for cuDNN before it takes the system's, in its order.
VARIABLES = ("CUDNN_HOME", "CUDNN_PATH")
#: Loaded first, in the order of their names: the other libraries are linked to them, by name alone.
_LINKED_BY_OTHERS = ("libcudnn_graph.", "libcudnn_ops.")
_RECORDS_ANY_SEQUENCE = 91501
_RECORDED_MULTIPLE = 128
#: The `VARIABLES` that `load_bundled` has set.
_home: str | None = None


def load_bundled() -> None:
    """Load all of the cuDNN that was installed with PyTorch, so that Transformer Engine runs it too.

    Called before megatron-core is imported. Does nothing without Transformer Engine, if the user names another cuDNN
    (`VARIABLES`), or if PyTorch has no cuDNN of its own.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        return
    libraries = list((Path(torch.__file__).parents[1] / "nvidia").glob("*/lib/libcudnn*.so.*"))
    if not libraries:
        return
    home = str(libraries[0].parents[1])
    if any(os.environ.get(name, home) != home for name in VARIABLES):
        return
    libraries.sort(key=lambda library: (not library.name.startswith(_LINKED_BY_OTHERS), library.name))
    # A loaded library is used for every later request of the same name, from any path.
    for library in libraries:
        try:
            ctypes.CDLL(str(library))
        except OSError as error:
            logger.debug("%s: %s", library, error)
    global _home
    _home = os.environ[VARIABLES[0]] = home


def users_environment() -> dict[str, str]:
    """The environment without the variables that `load_bundled` has set, for other programs."""
    return {name: value for name, value in os.environ.items() if name != VARIABLES[0] or value != _home}


def problem() -> str | None:
    """The problem of the loaded cuDNN, if it is older than the one that PyTorch was built with."""
    try:
        torch.backends.cudnn.version()
    except RuntimeError as error:
        return str(error).partition(". ")[0]
    return None


def fix() -> str:
    """How a user gets PyTorch's own cuDNN."""
    named = [f"{name}({os.environ[name]})" for name in VARIABLES if os.environ.get(name, _home) != _home]
    return f"unset {' and '.join(named)}" if named else "take the other cuDNN out of LD_LIBRARY_PATH"


def can_record(seq_length: int) -> bool:
    """Whether attention over `seq_length` tokens is right in a CUDA graph."""
    if seq_length % _RECORDED_MULTIPLE == 0:
        return True
    if problem() is not None:
        return False
    version = torch.backends.cudnn.version()
    return version is None or version >= _RECORDS_ANY_SEQUENCE
