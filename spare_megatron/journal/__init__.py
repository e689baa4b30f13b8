"""The journal of a run: records, their files, and the history that results. Start with `records`, then `fold`."""
