"""A rank's process: bootstrap, training steps, rejoin and restart. Start with `train_step`."""
