"""What redundancy and cadence cost and bring: closed forms, the checks of them, and their joint optimum."""
