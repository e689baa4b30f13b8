"""Slurm: the batch script of a job, its submission, and the steps that run on its nodes."""
