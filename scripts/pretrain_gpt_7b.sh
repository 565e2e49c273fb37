#!/usr/bin/env bash
# scripts/pretrain_gpt_7b.sh [bf16|te|fp8] [flags]: configs/gpt_7b.yaml with configs/recipes/gpt_7b.yaml; scripts/launch.sh has the rest.
exec "$(dirname "${BASH_SOURCE[0]}")/launch.sh" gpt_7b "$@"
