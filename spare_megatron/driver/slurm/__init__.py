"""Jobs of Slurm: batch scripts, the steps of a job, its etcd."""
