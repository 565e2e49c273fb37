# shellcheck shell=bash
# What the batch scripts of this folder share. They source it after they have set `container`: srun's flags and the
# command in front of the job's own words ("$@"). It runs the words once on each node, and requeues the job where that
# helps:
#
#   ended by          status   what follows
#   the last step     0        nothing
#   SIGTERM           143      the ranks have saved; requeued. Slurm sends it before the time limit (--signal) and when it
#                              preempts the job. After scancel this script is gone, and nothing follows
#   a lost rank       75, …    requeued, at most MAX_REQUEUES times (3), without nodes that failed twice
#   anything else              the status is the job's: a mistake in a flag, a fault that came three times, divergence
#
# torchrun has tried MAX_RESTARTS times before a status arrives here. Environment: MASTER_PORT, MAX_RESTARTS,
# MAX_REQUEUES, and what network.sh and launch.sh read.

# shellcheck disable=SC2154  # the batch script sets `container`
log=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *StdOut=//p')
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
export MASTER_ADDR MASTER_PORT
# shellcheck source=scripts/slurm/network.sh
. "$SLURM_SUBMIT_DIR/scripts/slurm/network.sh"

say() { echo "slurm job $SLURM_JOB_ID: $*"; }

requeue() {
  local bad
  # Slurm ends this script with SIGTERM soon after the request. The nodes are left out before that.
  trap '' TERM
  scontrol requeue "$SLURM_JOB_ID"
  # Slurm's names have no domain.
  bad=$(sed -n 's/.*leave it out (Slurm: sbatch --exclude=\([^).]*\).*/\1/p' "$log" | sort -u | paste -sd,)
  if [ -n "$bad" ]; then
    say "leaves out $bad"
    scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$bad"
  fi
  exit 0
}

run_job() {
  local status=0 failures
  [ $# -gt 0 ] || { echo "error: give a command, e.g. scripts/pretrain_gpt_175b.sh fp8 --data-path …" >&2; exit 2; }
  say "start ${SLURM_RESTART_COUNT:-0} on $SLURM_JOB_NODELIST"
  # One launcher a node. If one fails, the others cannot go on.
  srun --ntasks-per-node=1 --kill-on-bad-exit=1 "${container[@]}" "$@" || status=$?
  case $status in
    0) say "done" ;;
    143)
      say "stopped by a signal and saved; requeued"
      requeue
      ;;
    75 | 134 | 135 | 137 | 139) # another rank was lost; abort, bus error, kill, segmentation fault
      failures=$(grep -c '^slurm job .*: a rank was lost' "$log" || true)
      if grep -q 'no more restarts: ' "$log"; then
        say "the same fault came again and again: not requeued"
      elif [ "$failures" -ge "${MAX_REQUEUES:-3}" ]; then
        say "ranks were lost in $failures starts before: not requeued"
      else
        say "a rank was lost (status $status); requeued"
        requeue
      fi
      exit "$status"
      ;;
    *)
      say "failed with status $status"
      exit "$status"
      ;;
  esac
}
