"""The programs: one module per command. Its `main(words, prog)` returns the exit status.

`fp8-megatron NAME`, `pretrain_gpt.py` and the programs in tools/ call them. Modules import heavy packages inside
functions, so that help and errors appear at once.
"""
