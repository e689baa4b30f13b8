"""What the components of a rank share, how far it has come, and the interface of its optimizer state."""
