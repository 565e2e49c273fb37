#!/usr/bin/env bash
# scripts/pretrain_llama_70b.sh [bf16|te|fp8] [flags]: configs/llama_70b.yaml with configs/recipes/llama_70b.yaml; scripts/launch.sh has the rest.
exec "$(dirname "${BASH_SOURCE[0]}")/launch.sh" llama_70b "$@"
