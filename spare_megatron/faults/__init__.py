"""Faults to inject: their kinds, the moments at which they strike, and those inside a rank."""
