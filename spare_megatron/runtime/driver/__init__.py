"""The process that a user starts: supervisors here and elsewhere, metrics, how the run ended."""
