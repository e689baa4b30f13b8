"""The process that a user starts: preflight, faults to inject, store, supervisors, telemetry, summary."""
