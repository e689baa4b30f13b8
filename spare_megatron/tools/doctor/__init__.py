"""`spare doctor` and `spare check-program`: machines and programs before a run."""
