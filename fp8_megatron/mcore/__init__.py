"""megatron-core's GPT with this project's layers. Code that depends on megatron-core is here."""

import logging
import warnings

# It imports this module of torch, which says where a CUDA toolkit without a GPU is, as on a login node.
_extensions = logging.getLogger("torch.utils.cpp_extension")
_was_disabled, _extensions.disabled = _extensions.disabled, True
with warnings.catch_warnings():
    # On import it warns of each optional package that is not installed. Nothing here uses one of them.
    warnings.filterwarnings("ignore", module=r"megatron\.core\.")
    import megatron.core
    import megatron.core.models.backends  # noqa: F401

    from . import seams

    seams.check()
_extensions.disabled = _was_disabled
seams.quiet()
