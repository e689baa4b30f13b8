"""Commands that never run in training. Nothing outside this folder imports it, but for `commands`."""
