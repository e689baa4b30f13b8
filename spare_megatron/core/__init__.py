"""The decisions of a run. Pure: a room each for the log, the controller, audits, machines, slow machines and saves."""
