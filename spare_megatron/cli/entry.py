"""Entry point of `spare`: makes Ctrl-C exit without a traceback, then imports the commands."""

import signal

from spare_megatron.process import interrupts


def main() -> None:
    interrupts.exit_at_once()
    from spare_megatron.cli.main import app

    try:
        app()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the exit code is settled
