"""Microbatches that are computed twice: which, whose result is wrong, and which first steps are verified. Pure."""
