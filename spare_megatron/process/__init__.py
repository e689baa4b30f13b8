"""The processes of a run: how they start, what they send each other, and how they show that they live."""
