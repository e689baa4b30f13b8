"""`spare doctor`: the nodes of a run, looked at before it."""

import secrets
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spare_megatron.cli.config import fitting_machine
from spare_megatron.cli.console import RunConsole, Table
from spare_megatron.cli.preset import OverridesOption, PresetArgument, PresetOption, load_without_problems, one_preset
from spare_megatron.cli.printing import say, say_json
from spare_megatron.formats.quantities import format_bytes
from spare_megatron.machine.interrupts import raising

if TYPE_CHECKING:
    from spare_megatron.config.schema import RunConfig
    from spare_megatron.tools.doctor.diagnosis import NodeFinding, NodeMeasurements, Rate
    from spare_megatron.tools.doctor.node_processes import StartNode


def doctor(
    preset: PresetArgument = None,
    config: PresetOption = None,
    overrides: OverridesOption = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Folder on shared storage where nodes meet; left as it was found. [default: runs/doctor-WORD]"
        ),
    ] = None,
    node: Annotated[
        int | None,
        typer.Option(help="Act as this node for the `spare doctor` with the same --folder on node 0.", min=0),
    ] = None,
    wait_s: Annotated[float, typer.Option(help="Longest wait for other nodes, in seconds.", min=0)] = 300,
    as_json: Annotated[bool, typer.Option("--json", help="Print all findings as one JSON object.")] = False,
) -> None:
    """Examine all nodes of a run before it starts.

    Checks GPUs, versions, clocks, storage, limits, ports, control store, network and corpus: in a Slurm job
    (cluster.launcher=srun) on all nodes of the job, with cluster.launcher=hand on this machine and on those where
    `spare doctor --node` runs, otherwise on this machine.

    Exit codes: 0 no problems, 1 problems, 2 the examination failed.
    """
    if node is not None:
        if preset is not None or config is not None or folder is None:
            raise ValueError("--node takes --folder, that of the `spare doctor` elsewhere, and no preset")
        from spare_megatron.tools.doctor.node_preflight import serve_examination

        with raising():
            serve_examination(folder, node, wait_s)
        return
    preset = one_preset(preset, config, "doctor")
    loaded, _ = load_without_problems(preset, overrides or (), fitting_machine)  # what it asks is looked at there
    reports, findings = _examine(loaded, folder, wait_s)
    problems = [finding for finding in findings if finding.is_problem]
    if as_json:
        say_json(_as_json(reports, findings))
    else:
        _show(reports, findings)
    raise typer.Exit(1 if problems else 0)


def _examine(
    config: "RunConfig", folder: Path | None, wait_s: float
) -> "tuple[list[NodeMeasurements], list[NodeFinding]]":
    from spare_megatron.state.checkpoint.checkpoint_folder import folder_of
    from spare_megatron.tools.doctor.diagnosis import diagnose
    from spare_megatron.tools.doctor.node_preflight import examine
    from spare_megatron.tools.doctor.node_processes import Meeting, own_address, steps_of

    def words(node: int) -> tuple[str, ...]:
        return ("doctor", "--node", str(node), "--folder", str(folder))

    folder = (folder or Path("runs") / f"doctor-{secrets.token_hex(4)}").absolute()
    checkpoints = folder_of(config.checkpoint, folder).absolute()
    start: StartNode | None = None
    if config.cluster.launcher == "srun":
        from spare_megatron.driver.slurm.allocation import find_racks, nodes_for_run, this_job

        names = nodes_for_run(this_job(), config, find_racks())
        nodes, of_job = range(len(names)), dict(enumerate(names))
        host = own_address(config, nodes, of_job)
        start = steps_of(config.slurm, of_job, words, wait_s, None)
    else:
        num_nodes = config.cluster.num_nodes if config.cluster.launcher == "hand" else 1
        names = tuple(f"node {index}" for index in range(num_nodes))
        nodes = range(1, num_nodes)
        host = own_address(config, nodes, None)
        if num_nodes > 1:
            say(f"on node i = 1 ... {num_nodes - 1}: spare doctor --node i --folder {folder}", err=True)
    meeting = Meeting(folder=folder, host=host, logs=folder / "doctor", words=words, start=start, wait_s=wait_s)
    with raising():
        reports = examine(config, names, checkpoints, meeting)
    return reports, diagnose(config, str(checkpoints), reports)


def _as_json(reports: "Sequence[NodeMeasurements]", findings: "Sequence[NodeFinding]") -> dict[str, Any]:
    listed: dict[bool, list[dict[str, str]]] = {True: [], False: []}
    for one in findings:
        listed[one.is_problem].append({"node": one.node, "check": one.check, "text": one.text})
    return {"problems": listed[True], "warnings": listed[False], "nodes": [asdict(report) for report in reports]}


def _show(reports: "Sequence[NodeMeasurements]", findings: "Sequence[NodeFinding]") -> None:
    columns = ("node", "host", "GPUs", "free", "writes", "sends", "clock")
    RunConsole().tables(Table(columns=columns, rows=[_row(report) for report in reports]))
    for finding in findings:
        kind = "problem" if finding.is_problem else "warning"
        say(f"{kind}: {finding.node}: {finding.check}: {finding.text}")
    num_problems = sum(finding.is_problem for finding in findings)
    counts = ((len(reports), "node"), (num_problems, "problem"), (len(findings) - num_problems, "warning"))
    say(", ".join(f"{count} {what}{'' if count == 1 else 's'}" for count, what in counts))


def _row(report: "NodeMeasurements") -> tuple[str, ...]:
    facts = report.facts
    if facts is None:
        return (report.name, "not seen")
    clock = report.clock
    return (
        report.name,
        facts.host,
        str(len(facts.gpus)),
        format_bytes(facts.folder_free_bytes),
        _rate(report.write),
        _rate(report.link),
        "" if clock is None else f"{1e3 * clock.ahead_s:+.1f} ms",
    )


def _rate(rate: "Rate | None") -> str:
    return "" if rate is None else "failed" if rate.failure else f"{format_bytes(rate.bytes_per_s)}/s"
