"""What is wrong with a configuration. `validate` collects all problems."""
