"""A training step on one rank, from its plan to the update that the log commits: the controller decides, this obeys.

Read beside it: `core.controller.controller`, `mcore.trainer`, `comm.bucket_exchange` and `voting.voting`. If a group
dies in its backward pass, its fence in the log ends the waits of the others for its buckets (`_is_decided`). They vote
with what they hold (`attempt_reduce`) and read the decision (`read_entry`): a commit if all hold all sums; else a
retry, upon which the controller has them compute the dead group's microbatches (`ComputePatch`) and reduce again.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from spare_megatron.comm.communicators import report_incomplete
from spare_megatron.comm.slab_exchanges import SlabExchanges
from spare_megatron.config.training.audits_and_evaluations import audit_policy
from spare_megatron.core.audits.suspects import LossWatch
from spare_megatron.core.log import actions
from spare_megatron.core.log.entries import Fence, Resume, Undo, entry_fields
from spare_megatron.core.log.events import EndRequested, EntryRead, Event, HostsRead
from spare_megatron.core.log.gradient_guard import GradientFinding
from spare_megatron.core.log.votes import WRONG_NUMBERS, Digests
from spare_megatron.core.machines.failure_detector import Operation
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.records import ContributionRecord, EntryRecord, by_shard, digest_of_work
from spare_megatron.journal.step_values import model_figures
from spare_megatron.mcore.trainer import OnSlabReady
from spare_megatron.rank.evaluation import attempt_evaluation
from spare_megatron.rank.group_audits import GroupAudits
from spare_megatron.rank.group_saves import GroupSaves
from spare_megatron.rank.rank_reports import RankReports
from spare_megatron.rank.restart_loader import RestartLoader
from spare_megatron.rank.step_profile import StepProfile
from spare_megatron.rank.sync import Sites
from spare_megatron.stacking.plans import Microbatch, StepPlan
from spare_megatron.state.rank_context import RankContext, StepUnderWay
from spare_megatron.state.transfer.state_digests import StateDigests
from spare_megatron.state.transfer.state_transfer import StateSource, StateTransfer, admit
from spare_megatron.voting.agreement import Fenced, GroupOpinion, RankOutcome
from spare_megatron.voting.log_follower import Stop
from spare_megatron.voting.voting import plain_vote

_LONGEST_FAILURE = 150
"""Characters of a group's failure or wrong numbers in its vote, from which a fence's reason of at most 200 is made."""


@dataclass(slots=True, kw_only=True)
class Components:
    """What carries out a rank's actions. `profile` is None if no step is traced."""

    sums: SlabExchanges
    source: StateSource
    transfer: StateTransfer
    loader: RestartLoader
    digests: StateDigests
    audits: GroupAudits
    saves: GroupSaves
    reports: RankReports
    profile: StepProfile | None
    sites: Sites | None = None
    """If the run is one of several sites."""
    loss_watch: LossWatch = field(default_factory=LossWatch)
    pending: deque[actions.Action] = field(default_factory=deque)
    """What the controller has asked for and is left to do."""


def train(ctx: RankContext, parts: Components) -> Stop | actions.DrainGroups:
    """Trains until the controller stops the run, or the group leaves it. Returns the action that says so."""
    while (end := train_step(ctx, parts)) is None:
        ctx.probe.heartbeat.pause(ctx.trainer.leave_device)
    _stop(ctx, parts, end)
    return end


def train_step(ctx: RankContext, parts: Components) -> Stop | actions.DrainGroups | None:
    """One step, from its plan to the update that the log commits. Returns None then, else why training ends.

    What follows an update, such as a save, opens the next step. Once the rank is asked to end the run, that ends with
    the step under way. Collective over: all ranks of the group.
    """
    while True:
        if ctx.progress.is_end_asked():
            ctx.controller.handle(EndRequested(), now_s=time.monotonic())
        events: Sequence[Event] = ()
        match action := parts.pending.popleft():
            case actions.ComputeStep():
                compute_step(ctx, parts, action)
            case actions.BuildCommunicator():
                _build_communicator(ctx, action)
            case actions.AttemptReduce():
                events = attempt_reduce(ctx, parts, action)
            case actions.ReadVotes():
                events = ctx.voting.read_votes(action)
            case actions.AppendEntry():
                ctx.voting.append(action)
            case actions.ReadEntry():
                events = read_entry(ctx, parts, action.index)  # a fence, or what is decided: commit or retry
            case actions.ComputePatch():
                _compute_patch(ctx, parts, action)
            case actions.UpdateModel():
                update_model(ctx, parts, action)
                return None
            case actions.FinishRun() | actions.StopWipeOut() | actions.StopHalted():
                return action
            case actions.DrainGroups() if ctx.member in action.members:
                return action
            case _:
                events = _execute(ctx, parts, action)
        for event in events:
            # What follows from it comes before what was to be done.
            parts.pending.extendleft(reversed(ctx.controller.handle(event, now_s=time.monotonic())))


def _execute(ctx: RankContext, parts: Components, action: actions.Action) -> Sequence[Event]:
    """What not every step has. Returns the events that the action causes."""
    match action:
        case actions.ComputeAudits():
            parts.audits.compute(action)
        case actions.AwaitHosts():
            return _await_hosts(ctx, parts, action)
        case actions.AttemptEvaluation():
            return attempt_evaluation(ctx, parts.digests, action)
        case actions.ReportEvaluation():
            parts.reports.send_evaluation(action)
        case actions.AttemptSync():
            assert parts.sites is not None, "only a site takes part in rounds"
            return parts.sites.attempt(action)
        case actions.ApplySync():
            _apply_sync(ctx, parts, action)
        case actions.AttemptFinish():
            digests = parts.digests.for_vote()
            return ctx.voting.cast(action, plain_vote(action, digests, lacks_params=ctx.progress.lacks_params))
        case actions.AttemptUndo():
            parts.saves.settle()
            with ctx.probe.during(Operation.SAVE):
                held, _ = parts.loader.find_snapshots()
            vote = plain_vote(action, Digests(), lacks_params=False)
            return ctx.voting.cast(action, replace(vote, is_complete=False, held=held))
        case actions.ChangePaces():
            parts.reports.write_paces(action)
        case actions.DrainGroups():
            pass  # of other groups
        case actions.AdmitGroups():
            admit(ctx, parts.transfer, parts.digests, action)
        case actions.LoadCheckpoint():
            _go_back(parts, action)
        case actions.SaveCheckpoint():
            parts.saves.save(action)
        case actions.RefuseCheckpoint():
            parts.saves.refuse(action)
        case actions.SaveDispute():
            parts.saves.save_dispute(action)
        case actions.TakeSnapshot():
            parts.saves.take_snapshot(action)
        case actions.GatherParams():
            _gather_params(ctx, parts, action)
        case actions.StartRepairs():
            parts.digests.is_wanted |= action.is_compared
            ctx.optimizer_state.start_repairs(action)
        case _:
            raise AssertionError(f"this rank cannot execute {action}")
    return ()


def _apply_sync(ctx: RankContext, parts: Components, action: actions.ApplySync) -> None:
    """Ends a round with other sites. Collective over: all ranks of the group."""
    assert parts.sites is not None, "only a site takes part in rounds"
    step = action.entry.step
    parts.saves.settle()
    with parts.source.changing(step):
        parts.sites.apply(action)
    parts.digests.is_wanted |= bool(action.entry.round)
    parts.digests.compare_if_due(step)


def _go_back(parts: Components, action: actions.LoadCheckpoint) -> None:
    """Goes on from earlier state. No copy of the state may be under way. Collective over: all ranks of the group."""
    with parts.source.changing(action.step):
        parts.loader.restart(action, parts.digests)
    parts.loss_watch.on_restart(action.step)
    parts.sums.on_restart(action.step)


# ----------------------------------------------------------------------------------------------------------- computing


def compute_step(ctx: RankContext, parts: Components, action: actions.ComputeStep) -> None:
    """Starts the step or evaluation and computes this group's part of the plan from zero sums, once, if it has all
    parameters.
    """
    plan, before = action.plan, ctx.progress.step
    if before is not None and (before.step, before.is_evaluation) != (plan.step, plan.is_evaluation):
        before = None
    if before is not None and plan.digest in before.plans:
        return
    ctx.probe.begin_step(plan.step)
    if parts.profile is not None and before is None:
        parts.profile.end_step()
        if not plan.is_evaluation:
            parts.profile.begin_step(plan.step)
    ctx.progress.step = StepUnderWay(
        step=plan.step,
        started_s=time.monotonic() if before is None else before.started_s,
        makespan=plan.work.makespan,
        num_alive=len(ctx.controller.members),
        num_missing_stages=ctx.controller.num_missing_stages,
        is_evaluation=plan.is_evaluation,
    )
    if ctx.progress.lacks_params:
        return
    if plan.is_evaluation:
        ctx.trainer.evaluator.reset(plan.step)
    else:
        ctx.trainer.begin_step(plan.step)
    _compute(ctx, parts, plan, action.into)
    if before is not None and before.plans:
        parts.reports.clock.on_patched(plan.work)
    else:
        parts.reports.clock.on_computed()


def _compute_patch(ctx: RankContext, parts: Components, action: actions.ComputePatch) -> None:
    """Adds this group's part of a patch to the local sums that are not kept, once, if it has all parameters."""
    plan = action.plan
    if ctx.progress.lacks_params or plan.digest in ctx.progress.now.plans:
        return
    if action.into is not None:
        parts.sums.start_attempt(action.into)
    ctx.probe(FaultPoint.EVALUATION_PATCH if plan.is_evaluation else FaultPoint.PATCH)
    _compute(ctx, parts, plan, action.into)
    parts.reports.clock.on_patched(plan.work)


def _compute(ctx: RankContext, parts: Components, plan: StepPlan, into: actions.AttemptReduce | None) -> None:
    if into is not None:
        parts.sums.start_attempt(into)
    now, group = ctx.progress.now, ctx.member.group
    work, on_ready = plan.work.of(group), None
    if into is not None and work and ctx.config.reduce.overlap:
        on_ready = _begin_early(ctx, parts, into, [*now.computed, *work])
    if plan.is_evaluation:
        now.computed.extend(ctx.trainer.evaluator.compute(work))
    else:
        audited, audits = plan.audited_of(group), plan.audited_by(group)
        now.computed.extend(ctx.trainer.compute(work, on_ready, audited=audited, audits=audits))
        now.has_audits |= bool(plan.audits)
        now.audited.extend(sorted({*audited, *audits}))
        now.num_planned += len({*audited, *audits})
    now.plans.append(plan.digest)


def _begin_early(
    ctx: RankContext, parts: Components, action: actions.AttemptReduce, brought: Sequence[Microbatch]
) -> OnSlabReady:
    """Allows buckets to be sent while the last of the microbatches `brought` are computed; returns what backward passes
    report to.
    """
    _write_contribution(ctx, action, brought)
    parts.sums.begin_early(len(brought))
    return lambda position, num_ready: parts.sums.send_ready(position, num_ready, partial(_is_decided, ctx))


# ---------------------------------------------------------------------------------------------------------- an attempt


def _build_communicator(ctx: RankContext, action: actions.BuildCommunicator) -> None:
    """Starts to build in the background; the next attempt waits for it."""
    if action.key >= 0:
        ctx.probe(FaultPoint.REBUILD)
    for communicator in ctx.communicators:
        communicator.start_build(action.key, action.members)


def attempt_reduce(ctx: RankContext, parts: Components, action: actions.AttemptReduce) -> Sequence[Event]:
    """Sums what is not kept over the groups and casts the group's vote; abstains if the group lacks parameters.

    Returns all votes on the leader that casts the last one; else nothing. Collective over: all ranks of the group,
    and rank j of every member group. Raises UnsoundGradient if this group's gradient is not finite or an outlier; if
    own checks have found wrong numbers, the vote says so instead.
    """
    now, sums = ctx.progress.now, parts.sums
    now.epoch = action.epoch
    if parts.sites is not None:
        parts.sites.begin()
    sums.start_attempt(action)
    if ctx.progress.lacks_params:
        return _abstain(ctx, action)
    if not sums.is_early:
        _contribute(ctx, parts, action)
    with ctx.probe.during(Operation.REDUCE):
        sums.sum_rest(partial(_is_decided, ctx))  # to its end, or until another group is lost
        lacking = report_incomplete(sums.communicator, ctx.agreement, ctx.controller.head) if sums.has_given_up else ""
    outcome = _outcome(ctx, parts, action)
    digests = parts.digests.for_vote()
    with ctx.probe.during(Operation.SETTLE):
        now.opinion = opinion = ctx.agreement.settle(outcome)
    if not opinion.wrong_numbers:
        _raise_if_unsound(parts, opinion.finding)
    with ctx.probe.during(Operation.SETTLE):
        audits = parts.audits.digests(action.attempt, action.disputed)
        losses = parts.audits.losses(action.disputed, has_suspects=opinion.has_suspects)
        failure, evidence = "", ""
        if not opinion.is_complete:  # on some rank, not always the leader
            failure, evidence = _first(ctx, lacking), _first(ctx, sums.evidence)
    vote = replace(
        plain_vote(action, digests, lacks_params=False),
        is_complete=opinion.is_complete,
        num_complete=opinion.num_complete,
        save_ends=tuple(ctx.progress.save_ends),
        pace_ns=round(opinion.pace_s * 1e9),
        leaves=ctx.progress.is_leave_asked(),
        ends=opinion.ends,
        failure=failure[:_LONGEST_FAILURE],
        has_wrong_sum=opinion.has_wrong_sum,
        audits=audits,
        losses=losses,
        wrong_positions=opinion.wrong_positions,
        wrong_numbers="".join(opinion.wrong_numbers[:1])[:_LONGEST_FAILURE],
        sync=parts.sites is not None and parts.sites.is_due(),
    )
    vote = ctx.optimizer_state.with_copies(vote)
    votes = ctx.voting.cast(action, vote, now.computed, _wrong(opinion) or evidence)
    parts.reports.clock.on_reduced(sums.ready_at_s)
    return votes


def _contribute(ctx: RankContext, parts: Components, action: actions.AttemptReduce) -> None:
    """Records what this group is about to contribute, once its gradients are found sound."""
    computed = ctx.progress.now.computed
    ctx.probe(FaultPoint.BEFORE_REDUCE)
    parts.sums.measure_all(len(computed))
    finding = parts.sums.judge()
    if finding is not GradientFinding.SOUND and parts.sums.wrong_numbers():
        finding = GradientFinding.SOUND  # the sum carries what is unsound, and the vote what own checks have found
    _judge_losses(ctx, parts, action)  # before an unsound gradient ends this attempt
    _agree_on(ctx, parts, finding)  # before the record: a group that raises here contributes nothing
    _write_contribution(ctx, action, computed)
    # No rank sends before the leader's record: a sum may be kept though the leader is lost.
    _agree_on(ctx, parts, finding)


def _outcome(ctx: RankContext, parts: Components, action: actions.AttemptReduce) -> RankOutcome:
    """What the sums of the attempt are on this rank. Waits for the device."""
    now, sums = ctx.progress.now, parts.sums
    wrong = sums.first_wrong_sums()
    if sums.is_early:
        _judge_losses(ctx, parts, action)
    if sums.is_complete:
        ctx.probe(FaultPoint.AFTER_REDUCE)
    return RankOutcome(
        is_complete=sums.is_complete,
        num_complete=sums.num_complete,
        work_digest=digest_of_work(now.computed),
        finding=sums.judge(),
        loss=sums.loss_sum(),
        terms=sums.term_sums(),
        compute_s=ctx.probe.heartbeat.spans.passes.total_s(),
        pace_s=ctx.probe.pace_s(ctx.config.layout.virtual_pipeline),
        ends=ctx.progress.is_end_asked(),
        wrong_sums=wrong,
        has_suspects=bool(now.suspects),
        memory=ctx.trainer.memory(),
        wrong_numbers=sums.wrong_numbers() or ctx.trainer.checks.found(),
    )


def _is_decided(ctx: RankContext) -> bool:
    """Whether the next log entry is written, or a rank of any group has reported that the sums cannot complete."""
    return ctx.agreement.is_over(ctx.controller.head)


def _first(ctx: RankContext, failure: str) -> str:
    """The first failure of any rank. Collective over: all ranks of the group."""
    return next(filter(None, ctx.agreement.gathered(failure)), "")


def _agree_on(ctx: RankContext, parts: Components, finding: GradientFinding) -> None:
    """Raises `UnsoundGradient` if any rank's gradients are unsound. Collective over: all ranks of the group."""
    with ctx.probe.during(Operation.SETTLE):
        agreed = GradientFinding(ctx.agreement.highest(finding))
    _raise_if_unsound(parts, agreed)


def _raise_if_unsound(parts: Components, finding: GradientFinding) -> None:
    if finding is not GradientFinding.SOUND:
        raise parts.sums.error(finding)


def _judge_losses(ctx: RankContext, parts: Components, action: actions.AttemptReduce) -> None:
    """Journals and notes the suspects computed since the last call, before the vote. Ranks of the last stage wait for
    the device.
    """
    now, losses = ctx.progress.now, ctx.trainer.microbatch_losses()
    suspects = parts.loss_watch.on_losses(action.step, losses)
    samples = [ctx.trainer.corpus.addresses(action.step, suspect.microbatch.number) for suspect in suspects]
    parts.reports.write_suspects(action.attempt, suspects, samples)
    if audit_policy(ctx.config) is not None:  # votes name the suspects, to be audited
        now.losses.update(losses)
        now.suspects.update(suspect.microbatch.unit for suspect in suspects)


def _abstain(ctx: RankContext, action: actions.AttemptReduce) -> Sequence[Event]:
    """Votes without reducing. Collective over: all ranks of the group."""
    progress = ctx.progress
    progress.now.opinion = None
    with ctx.probe.during(Operation.SETTLE):
        failure = _first(ctx, progress.gather_failure)
    vote = replace(
        plain_vote(action, Digests(), lacks_params=True),
        save_ends=tuple(progress.save_ends),
        leaves=progress.is_leave_asked(),
        failure=failure[:_LONGEST_FAILURE],
    )
    return ctx.voting.cast(action, vote, evidence=progress.gather_evidence)


def _write_contribution(ctx: RankContext, action: actions.AttemptReduce, computed: Sequence[Microbatch]) -> None:
    record = ContributionRecord(
        group=ctx.member.group,
        step=action.step,
        attempt=action.attempt,
        epoch=action.epoch,
        members=[int(member) for member in action.members],
        microbatches=by_shard(computed),
        incarnation=ctx.member.incarnation,
        kept=list(action.kept),
    )
    ctx.write_if_leader(record)


def _wrong(opinion: GroupOpinion) -> str:
    """What is wrong with the group's own numbers, else with the sums that have come to it."""
    if opinion.wrong_numbers:
        return f"{WRONG_NUMBERS}: {'; '.join(opinion.wrong_numbers)}"
    found = [(rank, bucket) for rank, bucket in enumerate(opinion.wrong_sums) if bucket is not None]
    return "; ".join(f"rank {rank}: the sum of bucket {bucket} contradicts its checksum" for rank, bucket in found)


# ------------------------------------------------------------------------------------------------------------- the log


def read_entry(ctx: RankContext, parts: Components, index: int) -> Sequence[Event]:
    """Waits for the log entry. Collective over: all ranks of the group. Raises `Fenced` if it fences the group."""
    with ctx.probe.during(Operation.AWAIT_ENTRY):
        entry = ctx.voting.read_entry(index)
    progress, group, clock = ctx.progress, ctx.member.group, parts.reports.clock
    ctx.write_if_leader(EntryRecord(group=group, index=index, entry=entry_fields(entry)))
    if isinstance(entry, Fence):
        if entry.hits(ctx.member):
            raise Fenced(f"group {group} is fenced by log entry {index}: {entry.reason}")
        clock.on_group_lost(progress.num_steps if progress.step is None else progress.step.step, entry.group)
        parts.digests.is_wanted = True
    elif isinstance(entry, Resume | Undo):
        clock.on_pause()
        if isinstance(entry, Resume):
            parts.reports.send_pause(entry.step)
    else:
        clock.on_decided()
    return [EntryRead(index=index, entry=entry)]


def _await_hosts(ctx: RankContext, parts: Components, action: actions.AwaitHosts) -> Sequence[Event]:
    """Waits in a pause, some seconds at most, for the next log entry or for a further group that waits."""
    if ctx.voting.begin_pause(action.epoch):
        ctx.progress.step = None  # begun again when the pause ends
        parts.reports.clock.on_pause()
        parts.reports.send_pause(action.step, action.shards)
    with ctx.probe.during(Operation.AWAIT_ENTRY):
        if ctx.agreement.is_at_end(action.index):
            return [ctx.voting.poll_hosts(action) if ctx.agreement.is_leader else HostsRead()]
    return read_entry(ctx, parts, action.index)


# ----------------------------------------------------------------------------------------------------------- the update


def update_model(ctx: RankContext, parts: Components, action: actions.UpdateModel) -> None:
    """Applies the sums of the committed attempt."""
    progress, now = ctx.progress, ctx.progress.now
    ctx.optimizer_state.on_commit(action)
    now.num_recomputed = parts.reports.clock.on_commit()
    bytes_over_groups = parts.sums.commit()
    progress.save_ends.clear()
    recoveries = parts.reports.write_recoveries()
    ctx.probe(FaultPoint.AFTER_COMMIT)
    num_steps = action.step + 1
    parts.saves.await_copies(num_steps)
    opinion = now.opinion
    assert opinion is not None, "a commit needs the group's own complete sum"
    assert opinion.loss is not None, "a commit needs the group's own complete sum"
    with ctx.probe.during(Operation.UPDATE), parts.source.changing(num_steps):
        result = ctx.trainer.update(opinion.loss, parts.sums.squares, opinion.terms)
        figures = {} if result.figures is None else model_figures(ctx.agreement.gathered(result.figures))
    update = parts.reports.write_update(action.attempt, result, figures, now.spent_s, bytes_over_groups)
    parts.saves.report_finished()
    if ctx.optimizer_state.is_gathered:  # all other parameters are those of the step before
        progress.lacks_params = True
        parts.digests.forget()
    else:
        progress.num_steps = num_steps
        if action.sync:
            parts.digests.forget()
        else:
            parts.digests.compare_if_due(num_steps)
    parts.reports.send_step(update, recoveries, is_last=action.is_last)


def _gather_params(ctx: RankContext, parts: Components, action: actions.GatherParams) -> None:
    """Gathers all parameters from their owners. After a broken gather the group lacks parameters."""
    progress = ctx.progress
    if action.is_anew:
        progress.lacks_params = True
        parts.digests.is_wanted = True
    lacked = progress.lacks_params
    try:
        ctx.optimizer_state.gather(action)
    finally:  # even if the store is lost: a gather that is complete can still be saved
        if lacked and not progress.lacks_params:
            progress.num_steps = action.step
            parts.digests.compare_if_due(action.step)
            parts.saves.resume_postponed(action.step)


def _stop(ctx: RankContext, parts: Components, end: Stop | actions.DrainGroups) -> None:
    """Journals how the group ends and waits for its saves. Collective over: all ranks of the group."""
    is_final = not isinstance(end, actions.DrainGroups) and (not isinstance(end, actions.StopWipeOut) or end.is_final)
    if parts.sites is not None:
        parts.sites.end(is_final=is_final)
    if parts.profile is not None:
        parts.profile.end_step()
    parts.reports.clock.on_stop()
    parts.reports.write_recoveries()
    # A group that leaves at a commit has another state than those that go through the round after it.
    is_before_round = isinstance(end, actions.DrainGroups) and ctx.controller.is_syncing
    if not ctx.progress.lacks_params and not is_before_round:
        parts.digests.end(end.step, has_sha256=is_final)
    parts.saves.finish()
    parts.saves.report_finished()
