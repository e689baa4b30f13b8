"""Options of `spare plan` and `spare simulate` that say what becomes of lost groups and machines."""

from typing import Annotated

import typer

Repair = Annotated[
    str | None,
    typer.Option(help="Time from the loss of a group until its hardware is repaired, as in 10m. Makes groups rejoin."),
]
Join = Annotated[str | None, typer.Option(help="Time that all groups wait for an admission, as in 30s.")]
Reform = Annotated[
    str | None,
    typer.Option(
        help="Re-form groups from idle machines and those of broken groups: time from the loss of a machine until the "
        "group runs, as in 60s. A loss then takes one machine."
    ),
]
Machines = Annotated[int | None, typer.Option(help="Machines of a group, for --reform.")]
