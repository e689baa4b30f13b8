"""Entry point of `spare`: opens closed streams, makes Ctrl-C exit without a traceback, then imports the commands."""

from spare_megatron.machine import end_signal, interrupts, standard_streams


def main() -> None:
    standard_streams.open_closed()
    interrupts.exit_at_once()
    end_signal.block()  # until `train` acts on it
    from spare_megatron.commands import app

    try:
        app()
    finally:
        interrupts.ignore()


if __name__ == "__main__":
    main()
