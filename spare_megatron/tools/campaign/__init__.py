"""`spare campaign`: a run under many faults."""
