"""What nodes find when they look at themselves and at each other before a run."""
