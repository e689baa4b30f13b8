"""The journal of a run: records, their files, and the history that they tell. Start with `records`, then `fold`."""
