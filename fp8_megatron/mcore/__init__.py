"""megatron-core's GPT with this project's layers. Code that depends on megatron-core is here."""

import warnings

with warnings.catch_warnings():
    # On import it warns of each optional package that is not installed. Nothing here uses one of them.
    warnings.filterwarnings("ignore", module=r"megatron\.core\.")
    import megatron.core
    import megatron.core.models.backends  # noqa: F401
