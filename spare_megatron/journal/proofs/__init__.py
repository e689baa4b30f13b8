"""The proof that a run kept its invariant: the rules of `spare check`. Start with `proof`."""
