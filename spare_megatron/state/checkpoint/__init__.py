"""Checkpoints: how they are written, verified, found and loaded.

Start with `saver`, then `checkpoint_reader`.
"""
