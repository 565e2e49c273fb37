"""Mixture of experts: all of it that no other part of a layer needs.

`architecture` is what `models` is told of it, `layers` its functions on torch alone, `megatron` and `any_model` its
modules. `upcycling` makes experts of a model without any, `router_report` says how tokens were routed.
"""
