#!/usr/bin/env bash
# scripts/pretrain_qwen3_30b_a3b.sh [bf16|te|fp8] [flags]: configs/qwen3_30b_a3b.yaml with configs/recipes/qwen3_30b_a3b.yaml; scripts/launch.sh has the rest.
exec "$(dirname "${BASH_SOURCE[0]}")/launch.sh" qwen3_30b_a3b "$@"
