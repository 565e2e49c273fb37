#!/usr/bin/env bash
# scripts/pretrain_gpt_1.3b.sh [bf16|te|fp8] [flags]: configs/gpt_1.3b.yaml with configs/recipes/gpt_1.3b.yaml; scripts/launch.sh has the rest.
exec "$(dirname "${BASH_SOURCE[0]}")/launch.sh" gpt_1.3b "$@"
