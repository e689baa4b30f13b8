"""Builds what one rank is made of, as the run's configuration asks for."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from spare_megatron.comm.bucket_exchange import BucketExchange
from spare_megatron.comm.bucket_sums import ScatteredBuckets, Staging, make_bucket_sums
from spare_megatron.comm.communicators import CrossGroupCommunicator
from spare_megatron.comm.sum_watch import SumWatch, WaitWatch
from spare_megatron.comm.warm_up import warm_up
from spare_megatron.config.training.audit_schedule import audit_policy
from spare_megatron.core.controller.controller import Controller
from spare_megatron.core.machines.failure_detector import BEATS_PER_INTERVAL
from spare_megatron.formats.piece_frames import Address
from spare_megatron.journal.files import JournalWriter
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.process.rank_probe import RankProbe
from spare_megatron.process.specs import RankSpec
from spare_megatron.rank.bootstrap import check_same_device, check_shared_data, choose_device, join_group
from spare_megatron.rank.evaluation import Evaluation
from spare_megatron.rank.group_audits import GroupAudits
from spare_megatron.rank.group_log import GroupLog
from spare_megatron.rank.group_saves import GroupSaves
from spare_megatron.rank.rank_reports import RankReports
from spare_megatron.rank.reduction import Reduction
from spare_megatron.rank.restart_loader import RestartLoader
from spare_megatron.rank.state_restorer import StateRestorer
from spare_megatron.rank.step_executor import StepExecutor
from spare_megatron.rank.step_profile import StepProfile, wants_profile
from spare_megatron.rank.suspicions import Suspicions
from spare_megatron.rank.train import Executors
from spare_megatron.stacking.layout import GroupId, Member, PartitionId
from spare_megatron.state.checkpoint.checkpoint_folder import folder_of
from spare_megatron.state.checkpoint.dispute_saver import DisputeSaver
from spare_megatron.state.checkpoint.saver import Saver
from spare_megatron.state.checkpoint.start_checkpoint import check_weights
from spare_megatron.state.rank_progress import RankProgress
from spare_megatron.state.snapshot.snapshot_client import SnapshotClient
from spare_megatron.state.snapshot.snapshot_loader import SnapshotLoader
from spare_megatron.state.snapshot.snapshotter import Snapshotter
from spare_megatron.state.stacked.params_gather import ParamsGather
from spare_megatron.state.stacked.partition_copier import GroupRepairs, PartitionRepairs
from spare_megatron.state.stacked.stacked_state import StackedState
from spare_megatron.state.transfer.piece_server import PieceServer
from spare_megatron.state.transfer.served_state import StateSource, partition_contents
from spare_megatron.state.transfer.state_digests import StateDigests
from spare_megatron.state.transfer.state_transfer import StateTransfer
from spare_megatron.store import keys
from spare_megatron.store.decision_log import DecisionLog, ask_interval_s
from spare_megatron.store.interface import ControlStore
from spare_megatron.store.open_store import open_store
from spare_megatron.voting.agreement import GroupAgreement
from spare_megatron.voting.voting import Voting, open_relay


class Assembly:
    """The parts of one rank, built on construction. `ranks` are the group's, for CPU tensors.

    Collective over: all ranks of the group, which may arrive as far apart as the startup timeout allows.
    """

    def __init__(
        self,
        spec: RankSpec,
        controller: Controller,
        *,
        store: ControlStore,
        log: DecisionLog,
        journal: JournalWriter,
        send: Callable[[Any], None],
        probe: RankProbe,
        progress: RankProgress,
    ) -> None:
        self._spec, self._config = spec, spec.config
        self._controller = controller
        self._store = store
        self._journal = journal
        self._probe = probe
        self._progress = progress
        self.groups = [GroupId(group) for group in range(self._config.layout.most_groups)]
        device = choose_device(spec.config, spec.device, spec.number)
        self.ranks = join_group(spec, store, device)
        self.trainer = self._build_trainer(device)
        self.agreement = self._build_agreement(log)
        is_leader = self.agreement.is_leader
        relay = open_relay(spec.member, store, spec.config.control, len(self.groups)) if is_leader else None
        self._voting = Voting(self.agreement, relay)
        self._communicator = self._build_communicator(device)
        self._staging = Staging(self.trainer.gradients.new_staging)
        self._source = self._serve_state()
        server = spec.snapshot_server
        self._snapshots = None if server is None else SnapshotClient(server, spec.rank)
        self.loader = self._build_loader()
        self.digests = self._build_digests()
        self._reports = RankReports(
            member=spec.member,
            rank=spec.rank,
            journal=journal,
            send=send,
            is_leader=is_leader,
            sends_steps=self._config.parallel.is_first_on_node(spec.group, spec.rank),
            probe=probe,
            progress=progress,
        )
        self.executors = self._build_executors()

    @property
    def may_break_device(self) -> bool:
        """As `CrossGroupCommunicator.may_break_device`."""
        return self._communicator.may_break_device

    def hosted(self) -> tuple[PartitionId, ...]:
        """The state partitions that the group holds at the start of the run."""
        ownership = self._controller.ownership
        return () if ownership is None else ownership.hosted_by(self._spec.member)

    # ----------------------------------------------------------------------------------------------- the executors

    def _build_executors(self) -> Executors:
        digests, reports, probe, progress = self.digests, self._reports, self._probe, self._progress
        bucket_sums = make_bucket_sums(self._spec.group, self.trainer, self._communicator)
        repairs = self._build_repairs(awaits_update=isinstance(bucket_sums, ScatteredBuckets))
        saves = self._build_saves()
        self.buckets = BucketExchange(
            position=self._spec.rank,
            lanes=self._config.parallel.beside(self._spec.rank),
            is_alone=self._config.parallel.ranks_per_group == 1,
            trainer=self.trainer,
            communicator=self._communicator,
            bucket_sums=bucket_sums,
            staging=self._staging,
            outlier_factor=self._config.train.gradient_outlier_factor,
            probe=probe,
        )
        audits = GroupAudits(trainer=self.trainer, agreement=self.agreement, reports=reports, progress=progress)
        reduction = self._build_reduction(audits, repairs)
        steps = StepExecutor(
            group=self._spec.group,
            trainer=self.trainer,
            reduction=reduction,
            source=self._source,
            saves=saves,
            digests=digests,
            reports=reports,
            profile=self._build_profile(),
            probe=probe,
            progress=progress,
        )
        evaluation = Evaluation(
            layout=self._config.parallel,
            trainer=self.trainer,
            voting=self._voting,
            digests=digests,
            reports=reports,
            probe=probe,
            progress=progress,
        )
        return Executors(
            steps=steps,
            audits=audits,
            evaluation=evaluation,
            reduction=reduction,
            log=GroupLog(voting=self._voting, digests=digests, reports=reports, probe=probe, progress=progress),
            restorer=self._build_restorer(),
            saves=saves,
            stacked=None if repairs is None else self._build_stacked(repairs, saves),
        )

    def _build_reduction(self, audits: GroupAudits, repairs: GroupRepairs | None) -> Reduction:
        reports, progress = self._reports, self._progress
        return Reduction(
            buckets=self.buckets,
            voting=self._voting,
            audits=audits,
            repairs=repairs,
            digests=self.digests,
            reports=reports,
            num_chunks=self._config.layout.virtual_pipeline,
            suspicions=Suspicions(self.trainer, reports, progress, has_audits=audit_policy(self._config) is not None),
            overlaps=self._config.reduce.overlap,
            probe=self._probe,
            progress=progress,
        )

    def _build_profile(self) -> StepProfile | None:
        spec = self._spec
        return StepProfile(spec, self._probe) if wants_profile(self._config.profile, spec.group, spec.rank) else None

    def _build_restorer(self) -> StateRestorer:
        timeout_s = self._config.reduce.timeout_s
        transfer = StateTransfer(
            trainer=self.trainer,
            agreement=self.agreement,
            source=self._source,
            find_server=self._find_server,
            timeout_s=timeout_s,
            probe=self._probe,
        )
        return StateRestorer(
            agreement=self.agreement,
            transfer=transfer,
            loader=self.loader,
            digests=self.digests,
            reports=self._reports,
            join_timeout_s=timeout_s,
            probe=self._probe,
            progress=self._progress,
        )

    def _build_stacked(self, repairs: GroupRepairs, saves: GroupSaves) -> StackedState:
        assert self.trainer.stacked is not None, "only stacked state is repaired"
        gather = ParamsGather(
            optimizer=self.trainer.stacked,
            agreement=self.agreement,
            communicator=self._communicator,
            probe=self._probe,
            staging=self._staging,
            progress=self._progress,
        )
        return StackedState(
            gather=gather,
            repairs=repairs,
            resume_snapshot=saves.resume_postponed,
            digests=self.digests,
            progress=self._progress,
        )

    def _build_saves(self) -> GroupSaves:
        return GroupSaves(
            saver=self._build_saver(),
            dispute_saver=None if audit_policy(self._config) is None else self._build_dispute_saver(),
            snapshotter=None if self._snapshots is None else self._build_snapshotter(self._snapshots),
            agreement=self.agreement,
            digests=self.digests,
            reports=self._reports,
            progress=self._progress,
        )

    # ------------------------------------------------------------------------------------------------ their parts

    def _build_trainer(self, device: torch.device) -> GroupTrainer:
        spec, config = self._spec, self._config
        # A restarted group has no state: it copies or loads its state partitions.
        check_weights(config.checkpoint)
        begins = not spec.incarnation and not config.checkpoint.load
        trainer = GroupTrainer(config, device, self._probe, hosted=self.hosted() if begins else ())
        if audit_policy(config) is not None:
            check_same_device(device, spec.group, self._store)
        if config.data.access == "shared":
            check_shared_data(trainer.corpus, spec.group, self._store)
        return trainer

    def _build_agreement(self, log: DecisionLog) -> GroupAgreement:
        config = self._config
        return GroupAgreement(
            self._spec.member,
            self.ranks,
            log,
            config.control.decision_timeout_s,
            may_come_back=self.groups,
            fan_in=config.control.vote_fan_in,
        )

    def _build_communicator(self, device: torch.device) -> CrossGroupCommunicator:
        reduce, trainer = self._config.reduce, self.trainer
        communicator = CrossGroupCommunicator(
            group=self._spec.group,
            position=self._spec.rank,
            device=device,
            store=self._store,
            timeout_s=reduce.timeout_s,
            ask_interval_s=ask_interval_s(self._config.parallel.num_ranks),
            probe=self._probe,
            warm_up=partial(warm_up, trainer.gradients.new_staging, is_stacked=trainer.stacked is not None),
        )
        if device.type == "cuda":
            SumWatch(communicator, lambda: open_store(self._spec.store), lambda: self._controller.head).start()
            beat_s = self._config.control.heartbeat_interval_s / BEATS_PER_INTERVAL
            waits = WaitWatch(communicator, self._probe.wait_for_groups, pause_s=beat_s, timeout_s=reduce.timeout_s)
            waits.start(device)
        return communicator

    def _build_digests(self) -> StateDigests:
        return StateDigests(
            trainer=self.trainer,
            agreement=self.agreement,
            journal=self._journal,
            probe=self._probe,
            every_steps=self._config.train.params_check_every_steps,
            hosted=() if self._spec.incarnation else self.hosted(),
        )

    def _build_repairs(self, *, awaits_update: bool) -> GroupRepairs | None:
        optimizer = self.trainer.stacked
        if optimizer is None:
            return None
        repairs = PartitionRepairs(
            member=self._spec.member,
            optimizer=optimizer,
            contents=partition_contents(optimizer),
            bytes_per_s=self._config.optimizer.repair_mib_per_s * 2**20,
            awaits_update=awaits_update,
            find_server=self._find_server,
            probe=self._probe,
        )
        repairs.run_in_background()
        return GroupRepairs(repairs=repairs, agreement=self.agreement, journal=self._journal, probe=self._probe)

    def _build_saver(self) -> Saver:
        config = self._config
        return Saver(
            config=config,
            folder=folder_of(config.checkpoint, self._spec.run_dir),
            trainer=self.trainer,
            agreement=self.agreement,
            ranks=self._writing_ranks(),
            connect=lambda: open_store(self._spec.store),
            probe=self._probe,
        )

    def _build_dispute_saver(self) -> DisputeSaver:
        return DisputeSaver(
            config=self._config,
            run_dir=self._spec.run_dir,
            trainer=self.trainer,
            ranks=self._writing_ranks(),
            probe=self._probe,
        )

    def _writing_ranks(self) -> dist.ProcessGroup:
        """The group's ranks, for one thread that writes."""
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=self._config.checkpoint.timeout_s))

    def _build_snapshotter(self, snapshot_server: SnapshotClient) -> Snapshotter:
        return Snapshotter(
            member=self._spec.member,
            position=self._spec.rank,
            trainer=self.trainer,
            snapshot_server=snapshot_server,
            probe=self._probe,
        )

    def _build_loader(self) -> RestartLoader:
        return RestartLoader(
            config=self._config,
            run_dir=self._spec.run_dir,
            rank=self._spec.rank,
            trainer=self.trainer,
            wiped_out_at_s=self._spec.wiped_out_at_s,
            snapshots=None if self._snapshots is None else self._build_snapshot_loader(self._snapshots),
            probe=self._probe,
        )

    def _build_snapshot_loader(self, snapshot_server: SnapshotClient) -> SnapshotLoader:
        return SnapshotLoader(
            member=self._spec.member,
            position=self._spec.rank,
            trainer=self.trainer,
            snapshot_server=snapshot_server,
            agreement=self.agreement,
            store=self._store,
            groups=self.groups,
            timeout_s=self._config.reduce.timeout_s,
            progress=self._probe.progress,
        )

    # -------------------------------------------------------------------------------------------- the piece server

    def _serve_state(self) -> StateSource:
        optimizer = self.trainer.stacked
        partitions = [] if optimizer is None else partition_contents(optimizer)
        source = StateSource({content.name: content for content in partitions})
        server = PieceServer(self._store.local_host(), source, self._config.reduce.timeout_s)
        server.start()
        self._store.put(keys.piece_server(self._spec.member, self._spec.rank), str(server.address))
        return source

    def _find_server(self, member: Member) -> Address:
        """The server of the member's rank at the same position, published before the member took part."""
        key = keys.piece_server(member, self._spec.rank)
        return Address.parse(self._store.wait(key, self._config.reduce.timeout_s))
