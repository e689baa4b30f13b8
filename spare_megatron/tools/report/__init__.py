"""`spare report`, `serve` and `timeline`: pages, comparisons and timelines of runs."""
