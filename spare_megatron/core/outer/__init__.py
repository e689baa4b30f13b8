"""The outer log: how sites agree on rounds, in which they join what each has computed. Pure. Start with `rounds`."""
