"""Computes the disputed microbatches of a step again and compares with what the groups have stated.

The parameters are those that the run has saved (`state.checkpoint.saver`); the ranks of one group compute.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from spare_megatron.config.loader import ConfigError, load_run_config
from spare_megatron.config.schema import RunConfig
from spare_megatron.config.training.run_terms import terms_in
from spare_megatron.core.audits.audits import Boundary, combined_digest, first_difference
from spare_megatron.journal.journal_index import JournalIndex
from spare_megatron.journal.proofs.audit_history import Address, DisputedStep, Stated, disputed_step, saved_disputes
from spare_megatron.journal.proofs.proof import fold_view
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.state.checkpoint.checkpoint_folder import NUM_DISPUTES_KEPT, checkpoint_path, disputes_of
from spare_megatron.state.checkpoint.verification import DamagedCheckpoint, verify
from spare_megatron.tools.replay.replay_parts import Where, compute, folder_of_replay, parts_of, parts_of_machine
from spare_megatron.tools.replay.replay_ranks import Recomputed, Wanted, serve_part

_HERE = Where()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCompared:
    """A group's digests of a microbatch beside those of the replay."""

    group: int
    digests: list[str]
    """All that it has voted with."""
    agrees: bool
    """Each of them is that of the replay."""
    differs_at: str
    """Where it departs from the replay first, as in a verdict; empty if it agrees or has not stated it."""
    boundaries: list[tuple[str, int, int, str]]
    """Those of its first statement that differs, else of any: kind, stage, rank, digest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchReplay:
    """A microbatch of the step, or a row of them: linear number of its first one in the batch, where its sequences lie,
    and its digests.
    """

    shard: int
    index: int
    number: int
    samples: list[str]
    digest: str
    boundaries: list[tuple[str, int, int, str]]
    groups: list[GroupCompared]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayMachine:
    node: int
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    step: int
    path: str
    """Folder of the parameters."""
    device: str
    group: int | None
    """Whose machines have computed it; None if it is this one."""
    machines: list[ReplayMachine]
    """Those, by the number of their supervisor, 0 for this one."""
    params: dict[int, str]
    """Group -> digest of its parameters before the step, where the journal has it."""
    microbatches: list[MicrobatchReplay]

    @property
    def is_confirmed(self) -> bool:
        """Whether each microbatch has come out as some group has stated it."""
        return all(any(group.agrees for group in one.groups) for one in self.microbatches)


def replay(run_dir: Path, step: int, microbatch: Address | None = None, where: Where = _HERE) -> Replay:
    """Computes the disputed microbatches of a step again, or one of them. ValueError: there is no such dispute, its
    parameters are not there or damaged, or a machine is not there or cannot compute as the run did.
    """
    view = JournalIndex(run_dir, settings=terms_in(run_dir))
    run = next((line.record for line in view.rare if isinstance(line.record, RunRecord)), None)
    if run is None:
        raise ValueError(f"the journal of {run_dir} does not say how the run began")
    disputed = disputed_step(view, fold_view(view, run), step)
    if disputed is None or not disputed.stated:
        raise ValueError(f"--step={step}: the run has no mismatch in this step; {_replayable(view, run_dir)}")
    if microbatch is not None and microbatch not in disputed.stated:
        named = ", ".join(f"{shard}.{index}" for shard, index in disputed.stated)
        raise ValueError(
            f"--microbatch={microbatch[0]}.{microbatch[1]} is not in dispute in step {step}; choose one of {named}"
        )
    path = checkpoint_path(disputes_of(run_dir), step)
    _require_parameters(path, disputed, step)
    config = _config_of_run(run_dir)
    config = replace(config, checkpoint=replace(config.checkpoint, load="", load_weights=str(path.absolute())))
    wanted = list(disputed.stated) if microbatch is None else [microbatch]
    if where.machine is None:
        parts = parts_of(config, view, where.group)
    else:
        group, parts = parts_of_machine(config, view, where.machine)
        where = replace(where, group=group)
    of_ranks, hosts = compute(config, run_dir, parts, Wanted(step=step, microbatches=wanted), where)
    return Replay(
        step=step,
        path=str(path),
        device=config.cluster.device,
        group=where.group,
        machines=[ReplayMachine(node=node, host=host) for node, host in hosts.items()],
        params=dict(disputed.params),
        microbatches=[
            _compared(address, [of_rank[number] for of_rank in of_ranks], disputed.stated[address])
            for number, address in enumerate(wanted)
        ],
    )


def _replayable(view: JournalIndex, run_dir: Path) -> str:
    saved = sorted(step for step, record in saved_disputes(view).items() if record.outcome == "saved")
    if not saved:
        return f"the run has saved the parameters of no step; spare audit {run_dir} lists mismatches"
    return f"choose one whose parameters were saved: {', '.join(map(str, saved))}"


def _require_parameters(path: Path, disputed: DisputedStep, step: int) -> None:
    if not path.is_dir():
        saved = disputed.saved
        if saved is None:
            why = "the run ended, or the group that was to save them, before they were saved"
        elif saved.outcome == "saved":
            why = f"the run keeps those of the newest {NUM_DISPUTES_KEPT} steps with disputes"
        else:
            why = f"their save {saved.outcome}: {saved.reason}"
        raise ValueError(f"--step={step}: its parameters are not in {path}: {why}; choose another step")
    try:
        verify(path)
    except DamagedCheckpoint as error:
        raise ValueError(f"--step={step}: its parameters in {path.parent} cannot be used: {error}") from error


def serve_node(run_dir: Path, node: int, wait_s: float, on_waiting: Callable[[str], None]) -> None:
    """Acts as this node for the replay of a group elsewhere. ValueError: none awaits it, or has to come to this run."""
    if _config_of_run(run_dir).cluster.launcher == "local":
        raise ValueError(
            f"--node={node}: with cluster.launcher=local all groups of {run_dir} are on one machine; leave --node out"
        )
    on_waiting(f"node {node} waits up to {wait_s:g} s for `spare replay {run_dir} --step N --group G` elsewhere")
    serve_part(folder_of_replay(run_dir), node, wait_s)


def _config_of_run(run_dir: Path) -> RunConfig:
    try:
        return load_run_config(run_dir / "config.toml").config
    except ConfigError as error:
        raise ValueError(f"{run_dir} is no run's directory: {error}") from error


# ------------------------------------------------------------------------------------------------------------ compare


def _compared(
    address: Address, of_ranks: Sequence[Recomputed], stated: Mapping[int, Sequence[Stated]]
) -> MicrobatchReplay:
    boundaries = sorted(one for of_rank in of_ranks for one in of_rank.boundaries)
    digest = f"{combined_digest(boundaries):016x}"
    return MicrobatchReplay(
        shard=address[0],
        index=address[1],
        number=of_ranks[0].number,
        samples=of_ranks[0].samples,
        digest=digest,
        boundaries=_shown(boundaries),
        groups=[compared_group(group, reported, digest, boundaries) for group, reported in sorted(stated.items())],
    )


def compared_group(
    group: int, reported: Sequence[Stated], digest: str, boundaries: Sequence[Boundary]
) -> GroupCompared:
    """What a group has stated about a microbatch, beside what a replay has found."""
    different = [one for one in reported if one.digest != digest]
    shown = next((one for one in (*different, *reported) if one.boundaries), reported[0])
    theirs = sorted(Boundary(*place, int(value, 16)) for place, value in shown.boundaries.items())  # type: ignore[arg-type]
    return GroupCompared(
        group=group,
        digests=[one.digest for one in reported],
        agrees=not different,
        differs_at=str(first_difference(theirs, boundaries) or "") if different else "",
        boundaries=_shown(theirs),
    )


def _shown(boundaries: Sequence[Boundary]) -> list[tuple[str, int, int, str]]:
    return [(one.kind, one.stage, one.position, f"{one.digest:016x}") for one in boundaries]
