#!/usr/bin/env bash
# Train a recipe on one node, on several, or inside Slurm. The scripts pretrain_*.sh call this.
#
#   scripts/launch.sh RECIPE [bf16|te|fp8] [flags of fp8-megatron train]
#
# RECIPE names configs/RECIPE.yaml (the model) and configs/recipes/RECIPE.yaml (batches and schedule). Flags override
# both. The precision is fp8 unless the second word says another.
#
#   one node        scripts/launch.sh gpt_345m --data-path PREFIX --tokenizer-model FILE
#   several nodes   on each of them, with N from 0:
#                   scripts/launch.sh gpt_13b --nnodes 4 --node-rank N --master-addr HOST --data-path …
#   Slurm           sbatch --nodes 16 scripts/slurm/venv.sbatch scripts/pretrain_gpt_175b.sh --data-path …
#   no GPU          scripts/launch.sh gpt_345m --cpu-ranks 2 --data-path …
#
# --gpus defaults to all GPUs of the node, --save-interval beside --save to 500. A step of a Slurm job fills in --nnodes,
# --node-rank, --master-addr, --master-port, --max-restarts 3, and --load from --save; a requeued job that has saved loads
# that in place of what its first start loaded (--load, --ckpt-step, --finetune, --no-load-…).
# Environment: PY (Python; default .venv/bin/python of this repository, else python3), GPUS_PER_NODE, MASTER_ADDR,
# MASTER_PORT, MAX_RESTARTS.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage() {
  sed -n '4,8s/^# *//p' "${BASH_SOURCE[0]}" >&2
  exit 2
}
fail() {
  echo "error: $*" >&2
  exit 2
}
# Whether the flag $1 is among the words after it.
given() {
  local flag=$1 word
  shift
  for word; do
    if [ "${word%%=*}" = "$flag" ]; then return 0; fi
  done
  return 1
}

# The value of the flag $1 among the words after it: the last one, or nothing.
value_of() {
  local flag=$1 value='' before='' word
  shift
  for word; do
    if [ "$before" = "$flag" ]; then value=$word; fi
    if [ "${word%%=*}" = "$flag" ] && [ "$word" != "$flag" ]; then value=${word#*=}; fi
    before=$word
  done
  printf %s "$value"
}
# Leaves in `words` those of "$@" that do not say what a first start loads.
without_first_load() {
  words=()
  while [ $# -gt 0 ]; do
    case $1 in
      --load | --ckpt-step) shift ;;
      --load=* | --ckpt-step=* | --finetune | --no-load-optim | --no-load-rng) ;;
      *) words+=("$1") ;;
    esac
    shift
  done
}

[ $# -ge 1 ] || usage
recipe=$1
shift
precision=fp8
case ${1:-} in
  bf16 | te | fp8)
    precision=$1
    shift
    ;;
  -* | '') ;;
  *) fail "the precision $1 is not one of bf16, te, fp8" ;;
esac

configs=()
for file in "$root/configs/$recipe.yaml" "$root/configs/recipes/$recipe.yaml"; do
  if [ -f "$file" ]; then configs+=("$file"); fi
done
[ ${#configs[@]} -gt 0 ] || fail "no recipe $recipe: there is no configs/$recipe.yaml"

python=${PY:-$root/.venv/bin/python}
if [ -z "${PY:-}" ] && ! [ -x "$python" ]; then python=python3; fi
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}

placement=()
if ! given --gpus "$@" && ! given --cpu-ranks "$@" && ! given --world-size "$@"; then
  gpus=${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)}}
  if [ "${gpus:-0}" -gt 0 ]; then
    placement+=(--gpus "$gpus")
  elif ! given --dry-run "$@"; then
    fail "this node shows no GPU; give --gpus N, or --cpu-ranks N"
  fi
fi
if given --save "$@" && ! given --save-interval "$@"; then placement+=(--save-interval 500); fi
# A task of a job step has a node's number. The batch script itself has none that counts.
if [ -n "${SLURM_STEP_ID:-}" ]; then
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
  nodes=${SLURM_STEP_NUM_NODES:-${SLURM_NNODES:-1}}
  if [ "$nodes" -gt 1 ] && ! given --nnodes "$@"; then
    placement+=(--nnodes "$nodes" --node-rank "${SLURM_NODEID:?}")
    placement+=(--master-addr "${MASTER_ADDR:?scripts/slurm/job.sh sets it}" --master-port "${MASTER_PORT:-29500}")
  fi
  if ! given --max-restarts "$@" && ! given --restart "$@"; then
    placement+=(--max-restarts "${MAX_RESTARTS:-3}")
  fi
  # A job that was requeued goes on where it stopped, also if its first start loaded from another folder. That start was
  # refused if --save held another run's checkpoints, unless they were allowed.
  save=$(value_of --save "$@") load=$(value_of --load "$@")
  if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && [ -n "$load" ] && ! [ "$load" -ef "$save" ] &&
    [ -f "$save/latest_checkpointed_iteration.txt" ] && ! given --allow-foreign-checkpoints "$@"; then
    without_first_load "$@"
    set -- "${words[@]}"
    load=
  fi
  if [ -z "$load" ] && given --save "$@"; then placement+=(--load "$save"); fi
fi

exec "$python" -m fp8_megatron.cli train --config "${configs[@]}" --precision "$precision" "${placement[@]}" "$@"
