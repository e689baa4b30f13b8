"""The controller, which folds the log and answers events with actions. Pure. Start with `controller`."""
