"""A rank's process: the training loop and what carries out the controller's actions."""
