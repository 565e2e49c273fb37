#!/usr/bin/env bash
# scripts/pretrain_mixtral_8x7b.sh [bf16|te|fp8] [flags]: configs/mixtral_8x7b.yaml with configs/recipes/mixtral_8x7b.yaml; scripts/launch.sh has the rest.
exec "$(dirname "${BASH_SOURCE[0]}")/launch.sh" mixtral_8x7b "$@"
