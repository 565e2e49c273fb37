#!/usr/bin/env bash
# scripts/pretrain_gpt_345m.sh [bf16|te|fp8] [flags]: configs/gpt_345m.yaml with configs/recipes/gpt_345m.yaml; scripts/launch.sh has the rest.
exec "$(dirname "${BASH_SOURCE[0]}")/launch.sh" gpt_345m "$@"
