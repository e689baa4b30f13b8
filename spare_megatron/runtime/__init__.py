"""Processes: supervisor, ranks, communicators, and the training loop that carries out what `core` decides."""
