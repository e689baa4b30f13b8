"""What the command `spare` runs. The commands are imported once Ctrl-C ends the process without a traceback."""

import signal

from spare_megatron.process import interrupts


def main() -> None:
    """Runs the command of the arguments and exits with its code."""
    interrupts.exit_at_once()
    from spare_megatron.cli.main import app

    try:
        app()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the exit code is settled
