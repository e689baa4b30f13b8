"""Places of machines in the control store: the list of assignments, and groups that meet over several machines."""
