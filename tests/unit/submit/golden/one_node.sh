#!/bin/bash
# The run demo_cpu: 4 groups of 2 ranks on 1 node.
#SBATCH --job-name=demo_cpu
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --account=a
#SBATCH --output=/shared/runs/r/slurm.log
#SBATCH --open-mode=append
# The loss of a node is not the end of the job: spare_megatron goes on without it.
#SBATCH --no-kill
# The job may go back into the queue, and does so at the end of this script.
#SBATCH --requeue
# To all steps, so early that the run ends with the step under way and a checkpoint.
#SBATCH --signal=USR1@300
# This shell outlives signals to the whole job, of which the run ends in order.
trap : TERM USR1

cd /shared/here || exit 2
export SPARE_REQUEUES=0
home=/shared/runs/r
job=$SLURM_JOB_ID
/shared/venv/bin/python -P -m spare_megatron doctor --config "$home/config.toml" --folder "$home/doctor" || exit 2
# Every time that the job comes out of the queue is a run of its own, which goes on from the newest checkpoint.
attempt=$home/attempt-$(printf %03d "${SLURM_RESTART_COUNT:-0}")
/shared/venv/bin/python -P -m spare_megatron train --config "$home/config.toml" --run-dir "$attempt" --resume
status=$?

# 3 is a wipe-out, 5 a run that was asked to end with steps left. A job that was cancelled is not running any more.
if [[ $status == [35] && ${SLURM_RESTART_COUNT:-0} -lt $SPARE_REQUEUES ]] &&
    scontrol show job "$job" | grep -q JobState=RUNNING; then
    echo "exit code $status: the job goes back into the queue"
    scontrol requeue "$job"
    sleep 60 # Slurm ends this script
fi
exit $status
