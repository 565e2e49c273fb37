#!/usr/bin/env bash
# scripts/pretrain_gpt_175b.sh [bf16|te|fp8] [flags]: configs/gpt_175b.yaml with configs/recipes/gpt_175b.yaml; scripts/launch.sh has the rest.
exec "$(dirname "${BASH_SOURCE[0]}")/launch.sh" gpt_175b "$@"
