#!/bin/bash
# One run on a Slurm cluster: one srun, no ssh, one task per GPU. The resources are those of your job:
#
#   sbatch --nodes=2 --gpus-per-node=8 --ntasks-per-node=8 --cpus-per-task=12 scripts/slurm.sh -cn llama_65b_pp8 train_file=data.jsonl
#
# Submitted from the project's folder, which all hosts must see, with its .venv. When preempted or timed out, it saves and exits
# (--signal below); submitted again with resume=latest it continues. A job that Slurm puts back in the queue continues what
# it has begun by itself (`continue_requeued` in training/entry.py); if the run had finished, it ends at once with code 0.
#SBATCH --job-name=pipeline
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out

set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
[ -f .venv/bin/activate ] && . .venv/bin/activate

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR
gpus="${SLURM_GPUS_ON_NODE:-1}"
if [ "$gpus" -lt 1 ]; then
    echo "error: SLURM_GPUS_ON_NODE=$gpus: the job has no GPUs on this host; give --gpus-per-node=N to sbatch" >&2
    exit 1
fi
# The job's cores are divided among its tasks: since Slurm 22.05 srun no longer inherits --cpus-per-task from sbatch, and a
# task without it is bound to one core, which its loaders and an optimizer on the host (offload_optimizer=cpu) would share
cpus=$((${SLURM_CPUS_ON_NODE:-$gpus} / gpus))
unset SLURM_CPUS_PER_GPU # of sbatch --cpus-per-gpu, which srun does not take together with --cpus-per-task
# IN_CONTAINER: further options of srun, or a program that enters a container: docs/containers.md
# shellcheck disable=SC2086  # its words
exec srun --ntasks-per-node="$gpus" --gpus-per-node="$gpus" --cpus-per-task="$((cpus > 0 ? cpus : 1))" --kill-on-bad-exit=1 --label \
    ${IN_CONTAINER:-} python trainer_base_ds_mp.py "$@"
