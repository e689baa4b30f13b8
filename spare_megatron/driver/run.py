"""Takes one run on this machine from its configuration to its summary."""

import contextlib
import dataclasses
import ipaddress
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from spare_megatron.config.checks.validate import MachineResources, beyond_limits, on_device
from spare_megatron.config.loader import dump_run_config, write_with_exports
from spare_megatron.config.program_file import judge_program, resolved_program
from spare_megatron.config.schema import RunConfig
from spare_megatron.config.training.corpus import judge_corpus
from spare_megatron.config.training.run_terms import terms_of_run
from spare_megatron.config.training.sample_index_folders import leased
from spare_megatron.config.training.terms import changes_of, step_of
from spare_megatron.driver.driver import Driver
from spare_megatron.driver.event_command import EventCommand
from spare_megatron.driver.planned_faults import draw_faults, groups_hit, resolve_trace
from spare_megatron.driver.preflight import preflight
from spare_megatron.driver.storage_watch import RESERVED_BYTES, StorageWatch
from spare_megatron.driver.telemetry import Telemetry, open_sinks
from spare_megatron.faults.points import Fault
from spare_megatron.formats.output import named_errors
from spare_megatron.journal.files import FORMAT, ORIGIN, JournalWriter
from spare_megatron.journal.records import EndRecord
from spare_megatron.journal.run_record import RunRecord, digest_of_terms
from spare_megatron.journal.state.summary import Summary, conclude
from spare_megatron.machine.gpus import visible_gpus
from spare_megatron.machine.interrupts import Deferral, deferred
from spare_megatron.machine.lock import LOCK, locked
from spare_megatron.machine.network import why_no_slow_link
from spare_megatron.machine.processor_quota import why_no_quota
from spare_megatron.observe.metrics import OnStep
from spare_megatron.process.processes import close_or_report, report_held
from spare_megatron.process.reports import Message, RecordsHeld, RecordsLost, RunDirectoryOpened, RunEvent
from spare_megatron.process.shortages import process_limits
from spare_megatron.process.specs import RankMain, RankSpec
from spare_megatron.state.checkpoint.checkpoint_folder import folder_of
from spare_megatron.state.checkpoint.start_checkpoint import require_own_checkpoints, resolve_load
from spare_megatron.state.checkpoint.verification import Rejected, read_manifest
from spare_megatron.store.etcd_gateway import silence_of
from spare_megatron.store.open_store import check_files_for_etcd, etcd_spec, outer_spec
from spare_megatron.store.spec import EtcdStoreSpec
from spare_megatron.supervisor.remote_supervisor import ByHand, Launcher
from spare_megatron.version import __version__, code_digest, commit

_LEAST_PROOF_S, _PROOF_OF_INTERRUPTED_S = 2.0, 5.0
"""Longest time to read the journal where processes are about to be killed, and where a user waits for the end."""


def rank_main(spec: RankSpec, reports: Connection) -> None:
    """Main function of a rank's process. Imports there, because the fork server has the module already."""
    from spare_megatron.rank.rank import run_rank

    run_rank(spec, reports)


def look_at_machine(config: RunConfig, on_read: Callable[[str], None] = lambda _: None) -> MachineResources:
    """Collects what this machine offers a run. `on_read` is called with a description before a slow step."""
    corpus, corpus_failure = judge_corpus(config.data, on_read)
    program, program_failure = judge_program(config.program)
    limits, gpus = process_limits(), visible_gpus()
    num_machines = 1 if config.cluster.launcher == "local" else config.cluster.num_nodes  # all like this one
    fault_kinds = {fault.kind for fault in config.faults.trace}.union(config.faults.kinds)
    return MachineResources(
        num_gpus=num_machines * len(gpus),
        num_cores=num_machines * len(os.sched_getaffinity(0)),
        can_isolate=os.geteuid() == 0 and None not in map(shutil.which, ("ip", "bridge", "nsenter")),
        no_slow_host=why_no_quota() if "slow_host" in fault_kinds else "",
        no_slow_link=why_no_slow_link() if "slow_link" in fault_kinds else "",
        can_listen=_can_listen(config.control.listen_address),
        can_serve_metrics=_can_listen(config.metrics.prometheus_address, config.metrics.prometheus_port or 0),
        corpus_failure=corpus_failure,
        corpus=corpus,
        program=program,
        program_failure=program_failure,
        memory_bytes=_memory_bytes(),
        gpu_memory_bytes=min((gpu.memory_bytes for gpu in gpus), default=None),
        process_memory_bytes=min(_memory_bytes(), limits.address_space_bytes or _memory_bytes()),
        limits=limits,
        has_corpus=corpus is not None,
    )


def start_run(
    config: RunConfig,
    run_dir: Path,
    on_event: Callable[[RunEvent], None],
    rank_main: RankMain = rank_main,
    launcher: Launcher | None = None,
    on_step: OnStep | None = None,
    takes_requests: bool = False,
) -> Summary:
    """Trains, and writes all results into `run_dir`, which is empty or does not exist yet. A caller may wrap
    `rank_main` to observe a rank. `launcher`: for `cluster.launcher=srun`. `on_step` gets the metrics of each step, in
    a thread. With `takes_requests` signals end it after the step under way, and a second one at once. FileExistsError:
    the directory is not empty. ValueError: it cannot start, or another job uses a directory. KeyboardInterrupt: all
    processes have ended.
    """
    machine = look_at_machine(config, lambda what: on_event(Message(text=f"starting: {what}")))
    config = resolved(config, machine)
    if exceeded := beyond_limits(config, machine):
        raise ValueError("; ".join(exceeded))
    _refuse_used(run_dir)
    if config.control.store == "etcd":
        _ask_etcd(config, on_event)
    if config.sites.is_used:
        _ask_outer_etcd(config, on_event)
    faults = (*resolve_trace(config), *draw_faults(config))
    rejected: list[Path] = []

    def reject(item: Rejected) -> None:
        rejected.append(item.path)
        on_event(Message(text=f"checkpoint rejected: {item.reason}; trying the one before"))

    config = resolve_load(config, folder_of(config.checkpoint, run_dir), reject)
    on_event(Message(text="starting: Megatron, and the sample index of the corpus"))
    with contextlib.ExitStack() as held:
        held.enter_context(leased(config))
        on_event(Message(text=", ".join(f"{name}: {value}" for name, value in preflight(config).items())))
        if (port := config.metrics.prometheus_port) is not None:
            on_event(Message(text=f"Prometheus reads metrics at {config.metrics.prometheus_address}, port {port}"))
        run_dir = held.enter_context(_held_directories(config, run_dir, rejected))
        on_event(RunDirectoryOpened(path=run_dir))
        launcher = ByHand() if config.cluster.launcher == "hand" else launcher
        make_driver = partial(Driver, rank_main=rank_main, launcher=launcher, takes_requests=takes_requests)
        return _run(config, run_dir, on_event, faults, make_driver, on_step)


@contextlib.contextmanager
def _held_directories(config: RunConfig, run_dir: Path, rejected: Sequence[Path]) -> Iterator[Path]:
    """Locks the run's directory and its folder of checkpoints, then checks again what they hold. Yields the path that
    leads to the directory wherever it is moved. Raises as `start_run`.
    """
    with contextlib.ExitStack() as held:
        with named_errors("--run-dir", run_dir):
            path = held.enter_context(locked(run_dir))
        if _is_used(path):
            raise _used(run_dir)
        folder = folder_of(config.checkpoint, path)
        with named_errors("checkpoint.folder" if config.checkpoint.folder else "--run-dir", folder):
            held.enter_context(locked(folder))
        require_own_checkpoints(config, folder, rejected)
        yield path


def resolved(config: RunConfig, machine: MachineResources) -> RunConfig:
    """The configuration with this machine's device, the corpus and the program. ValueError: one cannot be used."""
    data = config.data
    if data.corpora or "datasets_provider" not in machine.program:
        if machine.corpus is None:
            raise ValueError(machine.corpus_failure or f"{data.named}: one of its files is missing")
        sets = zip(data.validation, machine.corpus.validation, strict=True)
        validation = tuple(dataclasses.replace(one, identity=facts.identity) for one, facts in sets)
        data = dataclasses.replace(data, identity=machine.corpus.identity, validation=validation)
        if data.end_of_document is None:
            data = dataclasses.replace(data, end_of_document=machine.corpus.end_of_document)
    config = on_device(config, machine)
    reduce = dataclasses.replace(config.reduce, bucket_mib=config.bucket_mib)
    return dataclasses.replace(config, reduce=reduce, data=data, program=resolved_program(config.program))


def _ask_etcd(config: RunConfig, on_event: Callable[[RunEvent], None]) -> None:
    """Reports at once that etcd does not answer, not only after the slow parts of the start. Raises ValueError for
    certificates or credentials that cannot be used.
    """
    spec = etcd_spec(config.control, config.name, os.environ)
    check_files_for_etcd(spec)
    if reason := silence_of(spec):
        silent = f"etcd at {', '.join(spec.endpoints)} (control.endpoints) does not answer: {reason}"
        until = f"at the end of the start, for control.store_timeout_s={spec.timeout_s:g} s at most"
        on_event(Message(text=f"warning: {silent}; it is awaited {until}"))


def _ask_outer_etcd(config: RunConfig, on_event: Callable[[RunEvent], None]) -> None:
    """Reports that the etcd of all sites does not answer, or refuses this one. Raises as `_ask_etcd`."""
    spec = outer_spec(config, os.environ)
    if not isinstance(spec, EtcdStoreSpec):
        return
    check_files_for_etcd(spec)
    if reason := silence_of(spec, refusal_counts=True):
        silent = f"etcd at {', '.join(spec.endpoints)} (sites.endpoints) cannot be used: {reason}"
        on_event(Message(text=f"warning: {silent}; until it can, this site trains alone"))


def _refuse_used(run_dir: Path) -> None:
    """Raises FileExistsError if the directory holds anything but a lock, or Locked if another run uses it."""
    if _is_used(run_dir):
        # That a run is training there is the more useful error.
        with locked(run_dir) if (run_dir / LOCK).exists() else contextlib.nullcontext():
            raise _used(run_dir)


def _is_used(run_dir: Path) -> bool:
    return run_dir.exists() and any(path.name != LOCK for path in run_dir.iterdir())


def _used(run_dir: Path) -> FileExistsError:
    return FileExistsError(f"{run_dir} is not empty; a run never overwrites another: choose another --run-dir")


def _run(
    config: RunConfig,
    run_dir: Path,
    on_event: Callable[[RunEvent], None],
    faults: tuple[Fault, ...],
    make_driver: Callable[..., Driver],
    on_step: OnStep | None,
) -> Summary:
    origin = {"version": __version__, "commit": commit(), "code": code_digest()}
    with named_errors("--run-dir", run_dir):
        write_with_exports(run_dir / "config.toml", dump_run_config(config), config)
        (run_dir / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n")
    record = run_record(config, faults, origin)
    storage = StorageWatch(run_dir, on_event)

    def dispatch(event: RunEvent) -> None:
        match event:
            case RecordsHeld():
                storage.on_held(event)
            case RecordsLost():
                storage.on_lost(event)
            case _:
                metrics.on_event(event)
                if command is not None:
                    command.on_event(event)
                on_event(event)

    command = EventCommand(config.watch.on_event, run_dir, dispatch) if config.watch.on_event else None
    with named_errors("--run-dir", run_dir):
        journal = storage.journal = JournalWriter(run_dir, "driver", on_held=report_held(dispatch))
        metrics = Telemetry(config, record, open_sinks(config, run_dir, dispatch, on_step))
    journal.write(record)
    journal.reserve(RESERVED_BYTES)
    driver = make_driver(config=config, run_dir=run_dir, faults=faults, journal=journal, on_event=dispatch)
    end: EndRecord | None = None
    with deferred() as interrupts:
        try:
            end = driver.run(interrupts)
        finally:
            driver.directory.poll()
            close_or_report(metrics, dispatch)
            storage.record_lost()
            close_or_report(journal, dispatch)
            storage.report_lost()
            summary = _conclude(run_dir, record, end, interrupts, driver.left_s)
            if command is not None:
                command.put({"event": "end", "outcome": summary.outcome, "reason": summary.outcome_reason})
                command.close()
    return summary


def _conclude(run_dir: Path, run: RunRecord, end: EndRecord | None, interrupts: Deferral, left_s: float) -> Summary:
    """The summary of a run that has ended; `left_s`: until its processes are killed, if that is known."""
    if end is None:  # it was interrupted
        return conclude(run_dir, run=run, proof_s=_PROOF_OF_INTERRUPTED_S)
    return conclude(run_dir, end, run=run, proof_s=max(_LEAST_PROOF_S, left_s), interruptible=interrupts.allowed)


def run_record(config: RunConfig, faults: tuple[Fault, ...], origin: Mapping[str, str]) -> RunRecord:
    """The terms of a run, from its resolved configuration and `origin.json`."""
    terms = terms_of_run(config)
    return RunRecord(
        **terms,
        terms=digest_of_terms(terms),
        format=FORMAT,
        num_processors=len(os.sched_getaffinity(0)) if config.cluster.device == "cpu" else 0,
        first_step=step_of(Path(config.checkpoint.load)) if config.checkpoint.load else 0,
        version=__version__,
        commit=origin["commit"],
        host=socket.gethostname(),
        code=origin["code"],
        changes=_changes(config),
        faults=[
            {
                "step": fault.step,
                "group": int(fault.group),
                "rank": fault.rank,
                "phase": str(fault.phase),
                "kind": fault.kind,
                "costs": sorted(groups_hit(config, fault)),
            }
            for fault in faults
        ],
    )


def _changes(config: RunConfig) -> dict[str, list[Any]]:
    """`RunRecord.changes`."""
    load = config.checkpoint.load
    return {name: [*both] for name, both in changes_of(read_manifest(Path(load)).terms, config).items()} if load else {}


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _can_listen(address: str, port: int = 0) -> bool:
    """Whether this machine can listen there; port 0 is any. True for what is no address, which validation reports."""
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
        with socket.socket(family) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
            listener.bind((address, port))
    except OSError:
        return False
    except (ValueError, OverflowError):
        return True
    return True
