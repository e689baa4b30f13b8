"""Checkpoints: how they are written, verified, found and loaded. Start with `saver`."""
