"""`spare plan`: closed forms for redundancy and cadence, and the plan that trains fastest.

Start with `plan`; `forecast` combines everything that can be lost. Formulas that are "derived" are ours;
docs/planner.md has their errors.
"""
