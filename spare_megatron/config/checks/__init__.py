"""What is wrong with a configuration.

Start with `validate`, which collects all problems.
"""
