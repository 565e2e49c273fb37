"""Not provided: Transformer Engine's modules with FP8 weights at rest."""

from .refusals import not_provided

raise not_provided(
    __name__,
    "Transformer Engine's modules keep 16-bit weights and read them by address; use torch.nn.Linear in their place, "
    "or fp8_megatron's FP8Linear, and leave use_te out",
)
