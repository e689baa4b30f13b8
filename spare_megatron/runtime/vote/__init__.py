"""A group's voice: agreement between its ranks, its vote, the decisions that it hears."""
