"""What happened in a run, on one page."""
