#!/usr/bin/env bash
# scripts/pretrain_gpt_30b.sh [bf16|te|fp8] [flags]: configs/gpt_30b.yaml with configs/recipes/gpt_30b.yaml; scripts/launch.sh has the rest.
exec "$(dirname "${BASH_SOURCE[0]}")/launch.sh" gpt_30b "$@"
