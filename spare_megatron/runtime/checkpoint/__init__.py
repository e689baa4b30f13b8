"""Checkpoints in a folder: written by several, verified, chosen from."""
