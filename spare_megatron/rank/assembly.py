"""Builds what one rank is made of, as the run's configuration asks for."""

from collections.abc import Callable
from functools import partial
from typing import Any

from spare_megatron.comm.bucket_exchange import BucketExchange, BucketSums, Staging
from spare_megatron.comm.communicators import CrossGroupCommunicator
from spare_megatron.comm.nccl import warm_up
from spare_megatron.comm.slab_exchanges import SlabExchanges
from spare_megatron.comm.sum_watch import SumWatch, WaitWatch
from spare_megatron.config.training.audits_and_evaluations import audit_policy
from spare_megatron.core.controller.controller import Controller
from spare_megatron.core.machines.failure_detector import BEATS_PER_INTERVAL
from spare_megatron.devices import gpu
from spare_megatron.faults.kinds import KINDS
from spare_megatron.journal.files import JournalWriter
from spare_megatron.mcore.corruption import OperationFaults
from spare_megatron.mcore.held_slabs import HeldSlab
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.process.heartbeats import RankProbe
from spare_megatron.process.specs import RankSpec
from spare_megatron.rank.bootstrap import (
    check_same_device,
    check_shared_data,
    choose_device,
    join_group,
    refuse_lost_gpu,
)
from spare_megatron.rank.group_audits import GroupAudits
from spare_megatron.rank.group_saves import GroupSaves
from spare_megatron.rank.rank_reports import RankReports
from spare_megatron.rank.restart_loader import RestartLoader
from spare_megatron.rank.step_profile import StepProfile, wants_profile
from spare_megatron.rank.sync import Sites
from spare_megatron.rank.train_step import Components
from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.state_partitions import hosted_by
from spare_megatron.state.checkpoint.saver import Saver
from spare_megatron.state.checkpoint.start_checkpoint import check_weights
from spare_megatron.state.optimizer_state import OptimizerState
from spare_megatron.state.rank_context import RankContext, RankProgress
from spare_megatron.state.snapshot.snapshot_client import SnapshotClient
from spare_megatron.state.snapshot.snapshot_loader import SnapshotLoader
from spare_megatron.state.snapshot.snapshotter import Snapshotter
from spare_megatron.state.stacked.stacked_state import StackedState
from spare_megatron.state.transfer.piece_server import PieceServer
from spare_megatron.state.transfer.state_digests import StateDigests
from spare_megatron.state.transfer.state_transfer import StateSource, StateTransfer
from spare_megatron.store import keys
from spare_megatron.store.decision_log import DecisionLog, ask_interval_s
from spare_megatron.store.interface import ControlStore
from spare_megatron.store.open_store import open_store
from spare_megatron.voting.agreement import GroupAgreement
from spare_megatron.voting.voting import Voting, open_relay


class Assembly:
    """The parts of one rank. `ranks`: the group's, for CPU tensors. Collective over: all ranks of the group, which may
    arrive as far apart as the startup timeout allows.
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
        refuse_lost_gpu(spec)
        self._spec, self._controller, self._store, self._probe = spec, controller, store, probe
        self._device = choose_device(spec.config, spec.device, spec.number)
        self.ranks = join_group(spec, store, self._device)
        trainer = self._build_trainer()
        agreement = self._build_agreement(log, trainer.num_positions)
        most_groups = spec.config.layout.most_groups
        relay = open_relay(spec.member, store, spec.config.control, most_groups) if agreement.is_leader else None
        self.ctx = RankContext(
            spec=spec,
            controller=controller,
            trainer=trainer,
            voting=Voting(agreement, relay, head=lambda: controller.head, write=journal.write, probe=probe),
            communicators=[self._build_communicator(trainer, slab) for slab in trainer.slabs],
            store=store,
            journal=journal,
            send=send,
            probe=probe,
            progress=progress,
        )
        self._staging = [Staging(slab.gradients.new_staging) for slab in trainer.slabs]
        server, runtime = spec.snapshot_server, gpu.runtime() if self._device.type != "cpu" else None
        self._snapshots = None if server is None else SnapshotClient(server, spec.rank, runtime)
        self.components = self._build_components()

    def _build_trainer(self) -> GroupTrainer:
        spec, config = self._spec, self._spec.config
        # A restarted group has no state: it copies or loads its state partitions.
        check_weights(config.checkpoint)
        begins = not spec.incarnation and not config.checkpoint.load
        hosted = hosted_by(self._controller.state_hosts, spec.member) if begins else ()
        trainer = GroupTrainer(spec.own_config, self._device, self._probe, hosted=hosted, slabs=config.slabs)
        if audit_policy(config) is not None:
            check_same_device(self._device, spec.group, self._store)
        if config.data.access == "shared":
            check_shared_data(trainer.corpus, spec.group, self._store)
        if any(KINDS[fault.kind].in_operations for fault in spec.faults):
            trainer.injector = OperationFaults(trainer)
        return trainer

    def _build_agreement(self, log: DecisionLog, num_positions: int) -> GroupAgreement:
        control = self._spec.config.control
        return GroupAgreement(
            self._spec.member,
            self.ranks,
            log,
            control.decision_timeout_s,
            may_come_back=[GroupId(group) for group in range(self._spec.config.layout.most_groups)],
            fan_in=control.vote_fan_in,
            num_positions=num_positions,
            stages=self._spec.stages,
        )

    def _build_communicator(self, trainer: GroupTrainer, slab: HeldSlab) -> CrossGroupCommunicator:
        spec, config, controller = self._spec, self._spec.config, self._controller
        communicator = CrossGroupCommunicator(
            group=spec.group,
            position=slab.position,
            device=self._device,
            store=self._store,
            timeout_s=config.reduce.timeout_s,
            ask_interval_s=ask_interval_s(config.parallel.num_ranks),
            probe=self._probe,
            warm_up=partial(warm_up, slab.gradients.new_staging, is_stacked=trainer.stacked is not None),
        )
        if self._device.type != "cpu":
            SumWatch(communicator, lambda: open_store(spec.store), lambda: controller.head).start()
            beat_s = config.control.heartbeat_interval_s / BEATS_PER_INTERVAL
            watch = WaitWatch(
                communicator, self._probe.heartbeat.wait_for_groups, pause_s=beat_s, timeout_s=config.reduce.timeout_s
            )
            watch.start(self._device)
        return communicator

    def _build_components(self) -> Components:
        ctx, config = self.ctx, self.ctx.config
        ctx.optimizer_state = self._build_optimizer_state()
        source = self._serve_state()
        loader = RestartLoader(ctx, None if self._snapshots is None else SnapshotLoader(ctx, self._snapshots))
        digests = StateDigests(ctx)
        saves = GroupSaves(
            ctx,
            saver=Saver(ctx),
            dispute_saver=None if audit_policy(config) is None else Saver(ctx),
            snapshotter=None if self._snapshots is None else Snapshotter(ctx, self._snapshots),
            digests=digests,
        )
        return Components(
            sums=self._build_sums(),
            source=source,
            transfer=StateTransfer(ctx, source),
            loader=loader,
            digests=digests,
            audits=GroupAudits(ctx),
            saves=saves,
            reports=RankReports(ctx),
            sites=None if ctx.trainer.outer is None else Sites(ctx, ctx.trainer.outer),
            profile=StepProfile(ctx) if wants_profile(config.profile, ctx.member.group, ctx.spec.rank) else None,
        )

    def _build_sums(self) -> SlabExchanges:
        ctx, config = self.ctx, self.ctx.config
        parts = zip(ctx.trainer.slabs, ctx.communicators, ctx.optimizer_state.bucket_sums, self._staging, strict=True)
        exchanges = [
            BucketExchange(
                position=slab.position,
                lanes=config.parallel.beside(slab.position),
                is_alone=config.parallel.ranks_per_group == 1,
                sums=slab.gradients,
                communicator=communicator,
                bucket_sums=bucket_sums,
                staging=staging,
                outlier_factor=config.train.gradient_outlier_factor,
                probe=ctx.probe,
            )
            for slab, communicator, bucket_sums, staging in parts
        ]
        return SlabExchanges(ctx.trainer, exchanges)

    def _build_optimizer_state(self) -> OptimizerState:
        ctx, optimizer = self.ctx, self.ctx.trainer.stacked
        if optimizer is None:
            pairs = zip(ctx.trainer.slabs, ctx.communicators, strict=True)
            return OptimizerState(ctx.trainer, [BucketSums(slab.gradients, one) for slab, one in pairs])
        hosted = () if ctx.spec.incarnation else hosted_by(ctx.controller.state_hosts, ctx.member)
        [staging] = self._staging
        return StackedState(ctx, optimizer, staging, hosted)

    def _serve_state(self) -> StateSource:
        """Starts the piece server."""
        ctx = self.ctx
        source = StateSource(ctx.optimizer_state.served)
        server = PieceServer(ctx.store.local_host(), source, ctx.config.reduce.timeout_s)
        server.start()
        for slab in ctx.trainer.slabs:
            ctx.store.put(keys.piece_server(ctx.member, slab.position), str(server.address))
        return source
