"""State that one group reads from another while training goes on.

Same imports as `state`. Start with `state_transfer` for rejoining groups, `partition_copier` for lost copies.
"""
