"""`spare check`, `spare audit`: what the journal of a run proves, and what its audits have compared and found."""

import shlex
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spare_megatron.cli.printing import say, say_json
from spare_megatron.formats.quantities import format_steps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spare_megatron.config.schema import RunConfig
    from spare_megatron.journal.proofs.audit_history import AuditHistory, Spoiled
    from spare_megatron.journal.proofs.joined_sites import SiteHistory, SiteSteps
    from spare_megatron.journal.state.overview import Proof
    from spare_megatron.journal.state.run_state import RunState

_EXIT_CODES = {"valid": 0, "invalid": 1, "unknown": 3}


def check(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Directory of a run, or of several.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
) -> None:
    """Prove a run from its journal, or the runs of several sites.

    The proof: every committed step counted each microbatch exactly once, and all groups kept the same parameters. Of
    several runs, those of the sites of one training, each in its order: which steps of which site are in the parameters
    that they have joined, and which samples of the order these have read.

    Exit codes: 0 valid, 1 invalid, 2 no journal, 3 unknown (the journal lacks records that the proof needs); of several
    runs the highest.
    """
    codes = [_check_run(run_dir, as_json=as_json, is_named=len(run_dirs) > 1) for run_dir in run_dirs]
    if len(run_dirs) > 1:
        codes.append(_check_sites(run_dirs, as_json=as_json))
    raise typer.Exit(max(codes))


def _check_run(run_dir: Path, *, as_json: bool, is_named: bool) -> int:
    """Prints the verdict about a run. Returns the exit code."""
    from spare_megatron.config.training.run_terms import terms_in
    from spare_megatron.journal.journal_index import JournalIndex
    from spare_megatron.journal.proofs.audit_history import find_undone, text_of_undone
    from spare_megatron.journal.proofs.proof import check as check_view
    from spare_megatron.journal.proofs.proof import fold_view
    from spare_megatron.journal.run_record import RunRecord

    view = JournalIndex(run_dir, settings=terms_in(run_dir))
    verdict = check_view(view)
    run = next((line.record for line in view.rare if isinstance(line.record, RunRecord)), None)
    changes = run.changes if run else {}
    undone = find_undone(fold_view(view, run)) if run else []
    if as_json:
        found = {**asdict(verdict), "changes": changes, "undone": list(map(asdict, undone))}
        found |= {"run_dir": str(run_dir)} if is_named else {}
        beside = ("remarks", "changes", "undone")
        say_json({name: value for name, value in found.items() if value or name not in beside})
    else:
        name = f"{run_dir}: " if is_named else ""
        say(f"{name}{verdict.verdict}: {format_steps(verdict.steps_committed)} committed")
        for name, (before, now) in changes.items():
            say(f"  went on with another value of {name}: {now}, and the checkpoint was trained with {before}")
        for steps in undone:
            say(f"  {text_of_undone(steps)}")
        for reason in (*verdict.reasons, *(f"remark: {remark}" for remark in verdict.remarks)):
            say(f"  {reason}")
    return _EXIT_CODES[verdict.verdict]


def _check_sites(run_dirs: "Sequence[Path]", *, as_json: bool) -> int:
    """Prints what the runs of sites have joined. Returns the exit code. ValueError: they are not of one training."""
    from spare_megatron.journal.proofs.joined_sites import join_sites

    configs, histories = _site_histories(run_dirs)
    joined = join_sites(histories)
    num_sites = next(iter(configs.values())).sites.num_sites
    absent = sorted(set(range(num_sites)) - configs.keys())
    if as_json:
        spans = {
            one.site: [[*steps, *_samples(configs[one.site], steps)] for steps in one.joined if steps[0] < steps[1]]
            for one in joined.sites
        }
        say_json({**asdict(joined), "samples": spans, "num_sites": num_sites, "absent": absent})
    else:
        rounds = ", ".join(map(str, joined.rounds)) or "none"
        say(f"joined in rounds {rounds}; site s reads samples s, s + {num_sites}, ...")
        for one in joined.sites:
            _say_site(one, configs[one.site])
        for site in absent:
            say(f"  site {site}: no run of it is given; what it would have read is unread")
        for finding in joined.findings:
            say(f"  {finding.severity}: {finding.reason}")
    return max((_EXIT_CODES.get(finding.severity, 0) for finding in joined.findings), default=0)


def _site_histories(run_dirs: "Sequence[Path]") -> "tuple[dict[int, RunConfig], list[SiteHistory]]":
    """Configurations by site, and what each site has done in its runs. Raises ValueError as `_check_sites`."""
    from spare_megatron.config.loader import load_run_config
    from spare_megatron.config.training.terms import microbatches_before, terms_of
    from spare_megatron.journal.journal_index import JournalIndex
    from spare_megatron.journal.proofs.joined_sites import SiteHistory
    from spare_megatron.journal.proofs.proof import fold_view
    from spare_megatron.journal.records import RoundRecord
    from spare_megatron.journal.run_record import RunRecord

    configs: dict[int, RunConfig] = {}
    histories: dict[int, SiteHistory] = {}
    for run_dir in run_dirs:
        config = load_run_config(run_dir / "config.toml").config
        view = JournalIndex(run_dir)
        run = next((line.record for line in view.rare if isinstance(line.record, RunRecord)), None)
        if not config.sites.is_used or run is None:
            raise ValueError(f"{run_dir} is not the run of a site (sites.endpoints); check it alone")
        site = config.sites.site
        configs[site] = config
        work = partial(microbatches_before, config)
        history = SiteHistory(site=site, first_step=run.first_step, microbatches_before=work)
        records = [line.record for line in view.rare if isinstance(line.record, RoundRecord)]
        histories.setdefault(site, history).add(fold_view(view, run), records)
    if len({str(dict(terms_of(one)) | {"sites.site": 0}) for one in configs.values()}) > 1:
        raise ValueError("the runs are not those of one training: their models, corpora or numbers of sites differ")
    return configs, list(histories.values())


def _samples(config: "RunConfig", steps: tuple[int, int]) -> tuple[int, int]:
    """First and last place in the order of samples that the site reads in these steps."""
    from spare_megatron.config.training.terms import sequences_before

    first, end = (sequences_before(config, step) for step in steps)
    return config.sites.read_of_order(first + 1) - 1, config.sites.read_of_order(end) - 1


def _say_site(one: "SiteSteps", config: "RunConfig") -> None:
    from spare_megatron.journal.proofs.joined_sites import without_gaps

    def named(spans: "Sequence[tuple[int, int]]") -> str:
        texts = []
        for first, end in without_gaps(spans):
            samples = " to ".join(map(str, _samples(config, (first, end))))
            texts.append(f"{first} to {end - 1} (samples {samples})")
        return ", ".join(texts) or "none"

    say(f"  site {one.site}: in the parameters are steps {named(one.joined)}")
    if one.left_out:
        say(f"    computed, and not in them: steps {named(one.left_out)}")
    if one.since is None:
        say("    it has not taken the newest of them")
    elif one.since[0] < one.since[1]:
        say(f"    computed since, for the next round: steps {named([one.since])}")


def proof_so_far(run_dir: Path, run_state: "RunState", most_s: float) -> "Proof":
    """Verdict and reasons: as the run's summary has them, or found now if that takes no longer."""
    from spare_megatron.config.training.run_terms import terms_in
    from spare_megatron.formats.codec import json_object
    from spare_megatron.journal.journal_index import JournalIndex
    from spare_megatron.journal.proofs.proof import check as check_view
    from spare_megatron.journal.state.summary import NOT_RUN

    summary = run_dir / "summary.json"
    if run_state.end is not None and summary.exists():
        found = json_object(summary)
        if found.keys() >= {"verdict", "reasons"}:  # versions before had no reasons there
            return found["verdict"], tuple(found["reasons"])
    try:
        until_s = time.monotonic() + most_s
        verdict = check_view(JournalIndex(run_dir, until_s=until_s, settings=terms_in(run_dir)))
    except TimeoutError:
        return NOT_RUN, (f"it takes more than {most_s:.0f} s: spare check {run_dir}",)
    return verdict.verdict, verdict.reasons


def audit(
    run_dir: Annotated[Path, typer.Argument(help="Directory of a run.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the audits as JSON.")] = False,
) -> None:
    """List what the audits of a run have compared and found.

    In an audit a second group computes a microbatch, too. A mismatch is settled by a third one before the step is
    committed. So is a microbatch whose loss is suspect. Groups that have found own numbers wrong are listed, too.

    Exit codes: 0 no mismatch, 1 mismatches or such groups, 2 no journal.
    """
    from spare_megatron.config.training.run_terms import terms_in
    from spare_megatron.journal.journal_index import JournalIndex
    from spare_megatron.journal.proofs.audit_history import audit_history
    from spare_megatron.journal.proofs.proof import fold_view
    from spare_megatron.journal.run_record import RunRecord

    view = JournalIndex(run_dir, settings=terms_in(run_dir))
    run = next((line.record for line in view.rare if isinstance(line.record, RunRecord)), None)
    if run is None:
        raise ValueError(f"the journal of {run_dir} does not say how the run began")
    history = audit_history(view, run, fold_view(view, run))
    if as_json:
        say_json(asdict(history))
    else:
        _print(history, run_dir)
    raise typer.Exit(1 if history.mismatches or history.culprits else 0)


def _print(history: "AuditHistory", run_dir: Path) -> None:
    from spare_megatron.journal.event_texts import text_of_audited
    from spare_megatron.journal.proofs.audit_history import text_of_spoiled, text_of_undone

    if not history.steps:
        every = history.every_steps
        say(f"no audits: {f'one is due every {every} steps' if every else 'audit.every_steps is 0'}")
    else:
        compared = f"{history.compared} microbatch{'' if history.compared == 1 else 'es'}"
        say(f"{compared} compared in {format_steps(history.steps)}, equal; {text_of_audited(history.audited_steps)}")
    for suspect in history.suspects:
        groups = ", ".join(map(str, suspect.asked))
        say(
            f"step {suspect.step}, attempt {suspect.attempt}: the loss of microbatch {suspect.index} of shard "
            f"{suspect.shard} is suspect; groups {groups} were asked to compute it"
            f"{', and agree: it is the data' if suspect.is_data else ''}"
        )
        if suspect.samples:
            say(f"  samples: {', '.join(suspect.samples)}")
    for found in history.mismatches:
        reported = "; ".join(f"group {group} {', '.join(digests)}" for group, digests in sorted(found.digests.items()))
        say(f"step {found.step}, attempt {found.attempt}: microbatch {found.index} of shard {found.shard}: {reported}")
        say(f"  computed again by group {', '.join(map(str, found.asked)) or 'none'}")
    for step, reason in history.saved.items():
        if reason:
            say(f"step {step}: its parameters are not saved: {reason}")
        else:
            say(f"step {step}: its parameters are saved; spare replay {run_dir} --step {step} computes it again")
    for culprit in history.culprits:
        say(f"step {culprit.step}: group {culprit.group} (incarnation {culprit.incarnation}) fenced: {culprit.reason}")
    for undone in history.undone:
        say(text_of_undone(undone))
    if history.spoiled is not None:
        say(text_of_spoiled(history.spoiled), way_back(history.spoiled, run_dir))
    if history.halted:
        say(f"halted: {history.halted}")


def way_back(spoiled: "Spoiled", run_dir: Path) -> str:
    """Says how another run can start from before the spoiled steps, with what this run has saved."""
    from spare_megatron.config.loader import ConfigError, load_run_config
    from spare_megatron.config.training.terms import step_of
    from spare_megatron.state.checkpoint.audited_checkpoints import audited_steps_in
    from spare_megatron.state.checkpoint.checkpoint_folder import all_checkpoints, folder_of
    from spare_megatron.state.checkpoint.verification import refusal_of

    try:
        checkpoint = load_run_config(run_dir / "config.toml").config.checkpoint
    except ConfigError:
        return "to go back: start from a checkpoint that `spare checkpoint list` calls audited"
    saved = all_checkpoints(folder_of(checkpoint, run_dir))
    clean = [path for path in saved if step_of(path) <= spoiled.audited_steps and not refusal_of(path)]
    if not clean:
        return "no checkpoint is of so few steps: only a training from the beginning is without it"
    load = shlex.quote(f"checkpoint.load={clean[0]}")
    if not checkpoint.folder:
        return f"to go back: spare train ... --set {load}"
    if (audited_steps_in(saved) or 0) >= step_of(clean[-1]):
        return "to go back: spare train ... --resume --restart-from audited"
    return f"to go back: spare train ... --set {load} --set checkpoint.folder=ANOTHER"
