#!/usr/bin/env bash
# scripts/pretrain_llama_7b.sh [bf16|te|fp8] [flags]: configs/llama_7b.yaml with configs/recipes/llama_7b.yaml; scripts/launch.sh has the rest.
exec "$(dirname "${BASH_SOURCE[0]}")/launch.sh" llama_7b "$@"
