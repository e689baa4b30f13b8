"""Checkpoints in a folder: written by several groups, verified, loaded.

Same imports as `state`. Start with `checkpoint_folder` and `saver`.
"""
