"""megatron-core's GPT with this project's layers. Code that depends on megatron-core is here."""

from .quick_import import quick_import

with quick_import():
    import megatron.core
    import megatron.core.models.backends  # noqa: F401

    from . import seams

    seams.check()
seams.quiet()
