"""`spare replay`: a disputed microbatch once more, on machines of choice."""
