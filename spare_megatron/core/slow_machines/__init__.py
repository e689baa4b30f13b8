"""What slow is, which machine holds the run back, and whether it is drained. Pure."""
