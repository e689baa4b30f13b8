"""To be written: what the room holds."""
