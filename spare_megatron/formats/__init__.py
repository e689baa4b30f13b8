"""What files, messages and texts look like: whole files, authenticated frames, quantities, printable text."""
