"""Pure decisions: which group computes what, and what the decision log means. No clock, socket or tensor."""
