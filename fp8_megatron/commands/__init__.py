"""The programs: one module a command, with `main(words, prog)` that returns the exit status.

`fp8-megatron NAME`, `pretrain_gpt.py` and the programs of tools/ call them. A module imports what is heavy only inside
its functions, so that help and errors come at once.
"""
