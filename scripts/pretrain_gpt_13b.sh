#!/usr/bin/env bash
# scripts/pretrain_gpt_13b.sh [bf16|te|fp8] [flags]: configs/gpt_13b.yaml with configs/recipes/gpt_13b.yaml; scripts/launch.sh has the rest.
exec "$(dirname "${BASH_SOURCE[0]}")/launch.sh" gpt_13b "$@"
