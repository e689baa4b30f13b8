"""The flat space of gradients: buckets, exact sums, digests, copies to the host."""
