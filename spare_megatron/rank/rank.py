"""The main function of a rank's process."""

import contextlib
import os
import time
from collections import deque
from dataclasses import replace
from multiprocessing.connection import Connection

import torch

from spare_megatron.config.program_file import judge_program
from spare_megatron.config.training.run_terms import terms_of_run
from spare_megatron.core.controller.controller import Controller
from spare_megatron.core.log.actions import Action, DrainGroups, FinishRun, StopHalted, StopWipeOut
from spare_megatron.core.log.entries import Halt, encode_entry
from spare_megatron.core.log.events import RunStarted
from spare_megatron.core.machines.failure_detector import Operation
from spare_megatron.core.saves.checkpoint_policy import emergency_save
from spare_megatron.faults.injection import JOURNAL_HANDLERS, Injector
from spare_megatron.faults.points import Fault
from spare_megatron.journal.files import JournalWriter
from spare_megatron.journal.records import LOST_A_PEER, RankRecord, TermsRecord
from spare_megatron.journal.run_record import digest_of_terms
from spare_megatron.machine.gpus.device_errors import is_memory_error
from spare_megatron.mcore.corruption import CORRUPTIONS, ChangedNothing
from spare_megatron.process.heartbeats import HeartbeatWriter, RankProbe
from spare_megatron.process.processes import close_or_report, leave, report_held, say
from spare_megatron.process.reports import ExitCode, FaultStruck, FaultWanted, RankRaised, RanksReady, RunStopped
from spare_megatron.process.specs import RankSpec, fault_record
from spare_megatron.rank.assembly import Assembly
from spare_megatron.rank.bootstrap import pass_times_on, wait_for_all_groups
from spare_megatron.rank.group_saves import save_alone
from spare_megatron.rank.rejoin import Rejoin
from spare_megatron.rank.train_step import train
from spare_megatron.state.rank_context import RankProgress
from spare_megatron.state.transfer.state_transfer import JoinFailed
from spare_megatron.store.decision_log import DecisionLog
from spare_megatron.store.interface import StoreLost
from spare_megatron.store.open_store import open_store
from spare_megatron.version import code_digest, code_mismatch
from spare_megatron.voting.agreement import Fenced, GroupBroken
from spare_megatron.voting.fencing import fence, is_connection_error
from spare_megatron.voting.log_follower import Stop, controller_setup, why_wiped_out


def run_rank(spec: RankSpec, reports: Connection) -> None:
    """Runs one rank to its end and exits the process with an `ExitCode`, unless it raises."""
    # A ValueError would concern all groups, and end the run.
    if mismatch := code_mismatch(spec.code) or judge_program(spec.config.program)[1]:
        raise RuntimeError(f"{mismatch}: restore the files with which the run began, and the group can take part")
    torch.set_num_threads(spec.config.cluster.threads_per_rank)
    rank = _Rank(spec, reports)  # keeps the communicators alive until the process exits
    code = rank.run()
    rank.close()
    leave(code)


class _Rank:
    def __init__(self, spec: RankSpec, reports: Connection) -> None:
        self._spec = spec
        self._reports = reports
        self._store = open_store(spec.store)
        self._log = DecisionLog(self._store)
        assert spec.page is not None, "who is a rank has its page"
        self._page = spec.page
        self._heartbeat = HeartbeatWriter(spec.page, pass_times_on(spec))
        self._journal = JournalWriter(
            spec.run_dir, spec.name, writing=self._heartbeat.writing, on_held=report_held(reports.send)
        )
        self._probe = RankProbe(Injector(spec.faults, self._journal_fault, self._request_fault), self._heartbeat)
        ends_at_s = None if spec.seconds_left is None else time.monotonic() + spec.seconds_left
        self._is_first_on_node = spec.config.parallel.is_first_on_node(spec.group, spec.rank)
        self._controller = Controller(replace(controller_setup(spec.config), ends_at_s=ends_at_s))
        self._progress = RankProgress(
            is_leave_asked=lambda: bool(self._page.leave_asked), is_end_asked=lambda: bool(self._page.end_asked)
        )
        self._parts: Assembly | None = None

    def run(self) -> ExitCode:
        """Trains, and maps the ways in which a run can end for this rank to exit codes."""
        try:
            interval_s = self._spec.config.control.heartbeat_interval_s
            self._heartbeat.start_beating(interval_s, on_cut_off=self._store.break_off)
            self._write_code()
            parts = self._parts = self._assemble()
            first = self._rejoin(parts) if self._spec.incarnation else self._start(parts)
            if isinstance(first, Stop):
                return self._stopped(first)
            with self._heartbeat.during(Operation.COMPUTE):
                parts.components.pending.extend(first)
                return self._stopped(train(parts.ctx, parts.components))
        except JoinFailed as error:
            say(error)
            code = ExitCode.JOIN_FAILED
            group, rank = self._spec.group, self._spec.rank
            self._reports.send(RankRaised(group=group, rank=rank, traceback=str(error), code=code))
            return code
        except Fenced as error:
            say(error)
            return ExitCode.FENCED
        except ChangedNothing as error:
            return self._halt(str(error))
        except StoreLost as error:
            return self._without_store(error)
        except GroupBroken as error:
            return self._broken(error)
        except RuntimeError as error:
            if not (is_connection_error(error) or self._is_aftermath(error)):
                raise
            return self._broken(error)

    def close(self) -> None:
        self._heartbeat.leave()
        close_or_report(self._journal, self._reports.send)

    def _write_code(self) -> None:
        group, incarnation = self._spec.member
        self._journal.write(RankRecord(group=group, rank=self._spec.rank, incarnation=incarnation, code=code_digest()))

    def _assemble(self) -> Assembly:
        parts = Assembly(
            self._spec,
            self._controller,
            store=self._store,
            log=self._log,
            journal=self._journal,
            send=self._reports.send,
            probe=self._probe,
            progress=self._progress,
        )
        if parts.ctx.agreement.is_leader:
            group, incarnation = self._spec.member
            digest = digest_of_terms(terms_of_run(self._spec.config))
            self._journal.write(TermsRecord(group=group, incarnation=incarnation, sha256=digest))
        return parts

    def _start(self, parts: Assembly) -> deque[Action]:
        parts.components.loader.load_initial()
        self._progress.num_steps = self._controller.step
        parts.components.digests.check(self._controller.step)  # the first vote compares the parameters
        wait_for_all_groups(self._spec, self._store, parts.ranks)
        self._report_ready()
        return deque(self._controller.handle(RunStarted(), now_s=time.monotonic()))

    def _rejoin(self, parts: Assembly) -> deque[Action] | Stop:
        """Waits until the group is admitted again or, after a wipe-out, until all waiting groups restart."""
        rejoin = Rejoin(
            parts.ctx,
            restart_loader=parts.components.loader,
            announced=self._report_ready,
            paused=parts.components.reports.send_pause,
        )
        first = rejoin.run()
        self._progress.num_restarts = self._controller.num_restarts
        return first

    def _report_ready(self, is_wiped_out: bool = False) -> None:
        if self._is_first_on_node:
            self._reports.send(RanksReady(group=self._spec.group, is_wiped_out=is_wiped_out))

    def _stopped(self, stop: Stop | DrainGroups) -> ExitCode:
        if isinstance(stop, DrainGroups):
            return ExitCode.LEFT
        if isinstance(stop, FinishRun):
            return ExitCode.STOPPED if stop.is_asked else ExitCode.FINISHED
        reason = why_wiped_out(stop) if isinstance(stop, StopWipeOut) else stop.reason
        is_halted = isinstance(stop, StopHalted)
        is_final = not isinstance(stop, StopWipeOut) or stop.is_final
        if self._spec.rank == 0:
            self._reports.send(RunStopped(group=self._spec.group, step=stop.step, reason=reason, is_final=is_final))
        if is_halted:
            return ExitCode.HALTED
        if is_final and isinstance(stop, StopWipeOut) and stop.shards:
            self._save_alone()
        return ExitCode.WIPE_OUT if is_final else ExitCode.RESTART

    def _halt(self, reason: str) -> ExitCode:
        """Ends the run for all groups: it was to show what becomes of a fault, and there was none."""
        step, index = self._progress.num_steps, self._controller.head
        text = encode_entry(Halt(step=step, reason=reason))
        while self._log.append(index, text) != text:
            index += 1
        return self._stopped(StopHalted(step=step, reason=reason))

    def _is_aftermath(self, error: RuntimeError) -> bool:
        """Whether an abort of a communicator, here or at a peer on the node, may have freed what the device still used.

        A peer aborts once the log has moved on; this rank may not have read that yet.
        """
        if self._parts is None or not is_memory_error(error):
            return False
        with contextlib.suppress(StoreLost):
            communicators = self._parts.ctx.communicators
            return any(one.may_break_device for one in communicators) or self._log.has(self._controller.head)
        return False

    def _broken(self, error: Exception) -> ExitCode:
        """A peer is gone, in the group or in the aftermath of an abort: other groups do not meet this error.

        The supervisor notices too; the first of them fences the group.
        """
        say(error)
        reason = f"rank {self._spec.rank} {LOST_A_PEER}"
        try:
            fence(self._log, self._spec.member, reason, self._controller.head)
        except StoreLost as lost:
            return self._without_store(lost)
        return ExitCode.GROUP_BROKEN

    def _without_store(self, error: StoreLost) -> ExitCode:
        say(error)
        self._save_alone()
        return ExitCode.STORE_LOST

    def _save_alone(self) -> None:
        """Saves the committed state without the other groups, if this group is to."""
        parts, run = self._parts, self._controller
        if parts is not None:
            save = emergency_save(
                self._spec.member,
                self._progress.num_steps,
                run.voters,
                run.epoch,
                run.state_hosts,
                first_step=run.terms.first_step,
                has_params=not self._progress.lacks_params,
                shorter=run.stages,
            )
            if save is not None:
                save = replace(save, audited_steps=run.audited_steps)
                save_alone(parts.ctx, save)

    def _request_fault(self, fault: Fault) -> None:
        """Injects the fault here, or requests it from the supervisor and waits until it has struck."""
        if fault.kind in CORRUPTIONS:
            assert self._parts is not None, "state is corrupted once it is there"
            CORRUPTIONS[fault.kind](self._parts.ctx.trainer, fault, self._parts.components.sums.at_hand)
        elif fault.kind in JOURNAL_HANDLERS:
            JOURNAL_HANDLERS[fault.kind](self._journal.fileno(), fault.seconds)
        else:
            self._reports.send(FaultWanted(fault=fault, pid=os.getpid()))
            self._reports.recv()

    def _journal_fault(self, fault: Fault) -> None:
        self._journal.write(fault_record(fault))
        self._reports.send(FaultStruck(fault=fault))
