"""The main function of a rank's process."""

import os
import time
from collections import deque
from dataclasses import replace
from multiprocessing.connection import Connection

import torch

from spare_megatron.comm.bucket_sums import ScatteredBuckets, Staging, make_bucket_sums
from spare_megatron.comm.communicators import CrossGroupCommunicator
from spare_megatron.comm.sum_watch import SumWatch
from spare_megatron.config.own_code import code_digest, code_mismatch
from spare_megatron.config.run_terms import terms_of_run
from spare_megatron.config.schema import RunConfig
from spare_megatron.core.actions import Action, FinishRun, SaveCheckpoint, StopHalted, StopWipeOut
from spare_megatron.core.controller import Controller
from spare_megatron.core.failure_detector import Operation
from spare_megatron.faults.injection import Injector, fill_disk
from spare_megatron.faults.trace import Fault
from spare_megatron.journal.files import JournalWriter
from spare_megatron.journal.records import LOST_A_PEER, FaultRecord, RankRecord, TermsRecord, digest_of_terms
from spare_megatron.mcore.corruption import CORRUPTIONS, corrupt
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.process.heartbeats import HeartbeatWriter
from spare_megatron.process.piece_wire import Address
from spare_megatron.process.processes import close_or_tell, leave, report_held, say
from spare_megatron.process.rank_probe import RankProbe
from spare_megatron.process.reports import ExitCode, FaultStruck, FaultWanted, RanksReady, RestartAwaited, RunStopped
from spare_megatron.process.specs import RankSpec
from spare_megatron.rank.bootstrap import (
    check_shared_data,
    choose_device,
    join_group,
    pass_times_on,
    wait_for_all_groups,
)
from spare_megatron.rank.executor import GroupExecutor
from spare_megatron.rank.gather import ParamsGather
from spare_megatron.rank.reduction import Reduction
from spare_megatron.rank.rejoin import Rejoin
from spare_megatron.rank.state_keeping import StateKeeping
from spare_megatron.rank.train import start, train
from spare_megatron.stacking.layout import GroupId, Member, PartitionId
from spare_megatron.state.transfer.partition_copier import GroupRepairs, PartitionRepairs
from spare_megatron.state.transfer.piece_server import PieceServer
from spare_megatron.state.transfer.state_digests import StateDigests
from spare_megatron.state.transfer.state_source import StateSource, partition_contents
from spare_megatron.state.transfer.state_transfer import JoinFailed, StateTransfer
from spare_megatron.store.decision_log import DecisionLog, ask_interval_s
from spare_megatron.store.interface import StoreLost
from spare_megatron.store.open_store import open_store
from spare_megatron.voting.agreement import Fenced, GroupAgreement, GroupBroken
from spare_megatron.voting.fencing import fence, is_connection_error
from spare_megatron.voting.log_follower import Stop, controller_setup, why_wiped_out
from spare_megatron.voting.voting import Voting, open_relay


def run_rank(spec: RankSpec, reports: Connection) -> None:
    """Runs one rank to its end and exits the process with an `ExitCode`, unless it raises."""
    if mismatch := code_mismatch(spec.code):  # a ValueError would concern all groups, and end the run
        raise RuntimeError(f"{mismatch}: restore the files with which the run began, and the group can take part")
    torch.set_num_threads(spec.config.cluster.threads_per_rank)
    rank = _Rank(spec, reports)  # keeps the communicators alive until the process exits
    code = rank.run()
    rank.close()
    leave(code)


def _all_groups(config: RunConfig) -> list[GroupId]:
    return [GroupId(group) for group in range(config.layout.num_groups)]


_SAVING_GROUPS = 2
"""Groups that save their state when the store is lost: two, as one may be lost at the same time."""


def _server_key(member: Member, rank: int) -> str:
    """Store key of the address of a rank's piece server."""
    return f"pieces/{member.group}/{member.incarnation}/{rank}"


class _Rank:
    def __init__(self, spec: RankSpec, reports: Connection) -> None:
        self._spec = spec
        self._reports = reports
        self._store = open_store(spec.store)
        self._log = DecisionLog(self._store)
        assert spec.page is not None, "who is a rank has its page"
        self._page = spec.page
        self._beacon = HeartbeatWriter(spec.page, pass_times_on(spec.device))
        self._journal = JournalWriter(
            spec.run_dir, spec.name, writing=self._beacon.writing, on_held=report_held(reports.send)
        )
        self._probe = RankProbe(Injector(spec.faults, self._journal_fault, self._request_fault), self._beacon)
        ends_at_s = None if spec.seconds_left is None else time.monotonic() + spec.seconds_left
        self._is_first_on_node = spec.config.parallel.is_first_on_node(spec.group, spec.rank)
        self._controller = Controller(replace(controller_setup(spec.config), ends_at_s=ends_at_s))
        self._executor: GroupExecutor | None = None

    def run(self) -> ExitCode:
        """Trains, and maps the ways in which a run can end for this rank to exit codes."""
        try:
            self._beacon.start_beating(self._spec.config.control.heartbeat_interval_s)
            self._write_code()
            executor = self._executor = self._build_executor()
            first = self._come_back(executor) if self._spec.incarnation else self._start(executor)
            if isinstance(first, Stop):
                return self._stopped(first)
            with self._beacon.during(Operation.COMPUTE):
                return self._stopped(train(self._controller, executor, first, lambda: bool(self._page.end_asked)))
        except JoinFailed as error:
            say(error)
            return ExitCode.JOIN_FAILED
        except Fenced as error:
            say(error)
            return ExitCode.FENCED
        except StoreLost as error:
            return self._without_store(error)
        except GroupBroken as error:
            return self._broken(error)
        except RuntimeError as error:
            if not is_connection_error(error):
                raise
            return self._broken(error)

    def close(self) -> None:
        self._beacon.leave()
        close_or_tell(self._journal, self._reports.send)

    def _write_code(self) -> None:
        group, incarnation = self._spec.member
        self._journal.write(RankRecord(group=group, rank=self._spec.rank, incarnation=incarnation, code=code_digest()))

    def _build_executor(self) -> GroupExecutor:
        spec, config = self._spec, self._spec.config
        device = choose_device(spec)
        ranks = self._ranks = join_group(spec, self._store, device)
        self._trainer = self._build_trainer(device)
        agreement = self._agreement = GroupAgreement(
            spec.member,
            ranks,
            self._log,
            config.control.decision_timeout_s,
            may_come_back=_all_groups(config) if config.spare.rejoins or config.checkpoint.max_restarts else (),
            fan_in=config.control.vote_fan_in,
        )
        if agreement.is_leader:
            digest = digest_of_terms(terms_of_run(config))
            self._journal.write(TermsRecord(group=spec.group, incarnation=spec.incarnation, sha256=digest))
        relay = open_relay(spec.member, self._store, config) if agreement.is_leader else None
        voting = Voting(agreement, relay)
        communicator = CrossGroupCommunicator(
            group=spec.group,
            position=spec.rank,
            device=device,
            store=self._store,
            timeout_s=config.reduce.timeout_s,
            ask_interval_s=ask_interval_s(config.parallel.num_ranks),
            probe=self._probe,
        )
        if device.type == "cuda":
            SumWatch(communicator, lambda: open_store(spec.store), lambda: self._controller.head).start()
        staging = Staging(self._trainer.gradients.new_staging)
        reduction = self._build_reduction(voting, communicator, staging)
        source = self._serve_state()
        keeping = self._keeping = StateKeeping(spec=spec, trainer=self._trainer, agreement=agreement, probe=self._probe)
        self._start_over = keeping.start_over(self._store)
        return GroupExecutor(
            trainer=self._trainer,
            voting=voting,
            reduction=reduction,
            gather=self._build_gather(agreement, communicator, staging),
            journal=self._journal,
            source=source,
            transfer=self._build_transfer(agreement, source),
            start_over=self._start_over,
            join_timeout_s=config.reduce.timeout_s,
            report=self._reports.send,
            tells_steps=self._is_first_on_node,
            probe=self._probe,
            digests=self._build_digests(agreement),
            saves=keeping.saves(self._journal, self._reports.send, reduction.save_ends.append),
        )

    def _build_reduction(self, voting: Voting, communicator: CrossGroupCommunicator, staging: Staging) -> Reduction:
        bucket_sums = make_bucket_sums(self._spec.group, self._trainer, communicator)
        repairs = self._build_repairs(voting.agreement, awaits_update=isinstance(bucket_sums, ScatteredBuckets))
        return Reduction(
            position=self._spec.rank,
            trainer=self._trainer,
            voting=voting,
            communicator=communicator,
            bucket_sums=bucket_sums,
            staging=staging,
            repairs=repairs,
            journal=self._journal,
            probe=self._probe,
            outlier_factor=self._spec.config.train.gradient_outlier_factor,
            overlaps=self._spec.config.reduce.overlap,
        )

    def _build_transfer(self, agreement: GroupAgreement, source: StateSource) -> StateTransfer:
        return StateTransfer(
            trainer=self._trainer,
            agreement=agreement,
            source=source,
            find_server=self._find_server,
            timeout_s=self._spec.config.reduce.timeout_s,
            probe=self._probe,
        )

    def _build_trainer(self, device: torch.device) -> GroupTrainer:
        spec, config = self._spec, self._spec.config
        # A restarted group has no state: it copies or loads its state partitions.
        begins = not spec.incarnation and not config.checkpoint.load
        trainer = GroupTrainer(config, device, self._probe, hosted=self._hosted() if begins else ())
        if config.data.access == "shared":
            check_shared_data(trainer.corpus, spec.group, self._store)
        return trainer

    def _hosted(self) -> tuple[PartitionId, ...]:
        """The state partitions that the group holds at the start of the run."""
        ownership = self._controller.ownership
        return () if ownership is None else ownership.hosted_by(self._spec.member)

    def _build_digests(self, agreement: GroupAgreement) -> StateDigests:
        return StateDigests(
            trainer=self._trainer,
            agreement=agreement,
            journal=self._journal,
            probe=self._probe,
            every_steps=self._spec.config.train.params_check_every_steps,
            hosted=() if self._spec.incarnation else self._hosted(),
        )

    def _build_gather(
        self, agreement: GroupAgreement, communicator: CrossGroupCommunicator, staging: Staging
    ) -> ParamsGather | None:
        optimizer = self._trainer.stacked
        if optimizer is None:
            return None
        return ParamsGather(
            optimizer=optimizer,
            agreement=agreement,
            communicator=communicator,
            probe=self._probe,
            staging=staging,
        )

    def _build_repairs(self, agreement: GroupAgreement, *, awaits_update: bool) -> GroupRepairs | None:
        optimizer = self._trainer.stacked
        if optimizer is None:
            return None
        repairs = PartitionRepairs(
            member=self._spec.member,
            optimizer=optimizer,
            contents=partition_contents(optimizer),
            bytes_per_s=self._spec.config.optimizer.repair_mib_per_s * 2**20,
            awaits_update=awaits_update,
            find_server=self._find_server,
            probe=self._probe,
        )
        repairs.run_in_background()
        return GroupRepairs(repairs=repairs, agreement=agreement, journal=self._journal, probe=self._probe)

    def _serve_state(self) -> StateSource:
        """Starts the server of this rank's state and publishes its address in the control store."""
        optimizer = self._trainer.stacked
        slices = [] if optimizer is None else partition_contents(optimizer)
        source = StateSource({content.name: content for content in slices})
        server = PieceServer(self._store.local_host(), source, self._spec.config.reduce.timeout_s)
        server.start()
        self._store.put(_server_key(self._spec.member, self._spec.rank), str(server.address))
        return source

    def _find_server(self, member: Member) -> Address:
        """The server of the member's rank at the same position, published before the member took part."""
        key = _server_key(member, self._spec.rank)
        return Address.parse(self._store.wait(key, self._spec.config.reduce.timeout_s))

    def _start(self, executor: GroupExecutor) -> deque[Action]:
        """Starts together with all other groups."""
        self._start_over.begin(self._hosted())
        executor.start(self._controller.step)
        wait_for_all_groups(self._spec, self._store, self._ranks)
        self._report_ready()
        return start(self._controller)

    def _come_back(self, executor: GroupExecutor) -> deque[Action] | Stop:
        """Waits until the group is admitted again or, after a wipe-out, until all waiting groups restart."""
        config = self._spec.config
        catching_up = Rejoin(
            controller=self._controller,
            agreement=self._agreement,
            journal=self._journal,
            start_over=self._start_over,
            groups=_all_groups(config),
            may_restart=config.checkpoint.max_restarts > 0,
            probe=self._probe,
            announced=self._report_waiting,
        )
        first = catching_up.run()
        executor.num_restarts = self._controller.restarts.num_restarts
        return first

    def _report_waiting(self, is_wiped_out: bool) -> None:
        self._report_ready()
        if is_wiped_out and self._is_first_on_node:
            self._reports.send(RestartAwaited(group=self._spec.group))

    def _report_ready(self) -> None:
        if self._is_first_on_node:
            self._reports.send(RanksReady(group=self._spec.group))

    def _stopped(self, stop: Stop) -> ExitCode:
        if isinstance(stop, FinishRun):
            return ExitCode.FINISHED
        reason = why_wiped_out(stop) if isinstance(stop, StopWipeOut) else stop.reason
        is_halted = isinstance(stop, StopHalted)
        is_final = is_halted or bool(stop.reason) or not self._spec.config.checkpoint.max_restarts
        if self._spec.rank == 0:
            self._reports.send(RunStopped(group=self._spec.group, step=stop.step, reason=reason, is_final=is_final))
        if is_halted:
            return ExitCode.HALTED
        return ExitCode.WIPE_OUT if is_final else ExitCode.RESTART

    def _broken(self, error: Exception) -> ExitCode:
        """A peer in the group is gone. The supervisor notices too; the first of them fences the group."""
        say(error)
        reason = f"rank {self._spec.rank} {LOST_A_PEER}"
        try:
            fence(self._log, self._spec.member, reason, self._controller.head)
        except StoreLost as lost:
            return self._without_store(lost)
        return ExitCode.GROUP_BROKEN

    def _without_store(self, error: StoreLost) -> ExitCode:
        """Saves the committed state on as many groups as may be needed: nothing can be decided any more."""
        say(error)
        if self._executor is None or not self._executor.num_steps or self._executor.lacks_params:
            return ExitCode.STORE_LOST
        # With partitioned optimizer state all groups save: each partition may be needed.
        controller, member = self._controller, self._spec.member
        if member in controller.voters[: None if self._trainer.stacked else _SAVING_GROUPS]:
            save = SaveCheckpoint(
                step=self._executor.num_steps, member=member, voters=controller.voters, epoch=controller.epoch
            )
            hosts = controller.ownership.hosts if controller.ownership else ()
            self._keeping.save_alone(replace(save, hosts=hosts))
        return ExitCode.STORE_LOST

    def _request_fault(self, fault: Fault) -> None:
        """Injects the fault here, or requests it from the supervisor and waits until it has struck."""
        if fault.kind in CORRUPTIONS:
            corrupt(self._trainer, fault.kind, fault.bit)
            return
        if fault.kind == "disk_full":
            fill_disk(self._journal.fileno(), fault.seconds)
            return
        self._reports.send(FaultWanted(fault=fault, pid=os.getpid()))
        self._reports.recv()

    def _journal_fault(self, fault: Fault) -> None:
        record = FaultRecord(
            group=fault.group, rank=fault.rank, step=fault.step, phase=str(fault.phase), kind=fault.kind
        )
        self._journal.write(record)
        self._reports.send(FaultStruck(fault=fault))
