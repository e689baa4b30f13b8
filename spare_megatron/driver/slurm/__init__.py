"""Slurm: batch scripts, the steps of a job, its own etcd.

Imports `config` and `store`.
Start with `job` for the batch script, `steps` for supervisors on nodes.
"""
