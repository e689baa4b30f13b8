"""The control store: the one place where groups agree."""
