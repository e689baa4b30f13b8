"""A rank's state outside its training: checkpoints, snapshots in memory, transfers to other groups.

Imports `voting`, `mcore` and above. Start with `checkpoint/saver`, `snapshot/snapshotter` or `transfer/state_transfer`.
"""
