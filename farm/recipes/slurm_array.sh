#!/bin/bash
# sbatch slurm_array.sh FOLDER MODELS: each task of the array renders its share of the jobs on one GPU. No Ray between
# machines, no open port. A task that is killed, or put back by the scheduler, goes on from its last steps.
#SBATCH --job-name=anygpu
#SBATCH --array=0-7
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=4
#SBATCH --mem=64G
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
folder=${1:?the folder with the jobs} models=${2:?the folder with the models}
exec anygpu-farm run "$folder" --local 1 --models "$models" --share "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT"
