"""A rank's state on its way: to groups that come back, to new hosts of slices, to files."""
