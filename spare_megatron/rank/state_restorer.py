"""Brings the state to a rank that takes part again: copied from a donor, or loaded after a wipe-out."""

from spare_megatron.core.controller.comparison import NO_DIGEST
from spare_megatron.core.log.actions import AdmitGroups, LoadCheckpoint
from spare_megatron.core.machines.failure_detector import Operation
from spare_megatron.process.rank_probe import RankProbe
from spare_megatron.process.reports import GroupRejoined, GroupRestarted
from spare_megatron.rank.rank_reports import RankReports
from spare_megatron.rank.restart_loader import RestartLoader
from spare_megatron.state.rank_progress import RankProgress
from spare_megatron.state.transfer.state_digests import StateDigests
from spare_megatron.state.transfer.state_transfer import StateTransfer, confirm
from spare_megatron.voting.agreement import GroupAgreement


class StateRestorer:
    """Carries out AdmitGroups and LoadCheckpoint; a rejoining group waits `join_timeout_s` at most for confirmation."""

    def __init__(
        self,
        *,
        agreement: GroupAgreement,
        transfer: StateTransfer,
        loader: RestartLoader,
        digests: StateDigests,
        reports: RankReports,
        join_timeout_s: float,
        probe: RankProbe,
        progress: RankProgress,
    ) -> None:
        self._agreement = agreement
        self._transfer = transfer
        self._loader = loader
        self._digests = digests
        self._reports = reports
        self._join_timeout_s = join_timeout_s
        self._probe = probe
        self._progress = progress

    def admit(self, action: AdmitGroups) -> None:
        """Admits groups, of which this may be one; the next vote compares all.

        Collective over: all ranks of the group. Raises `JoinFailed` if this group is admitted and cannot get the state.
        """
        agreement, progress, digests = self._agreement, self._progress, self._digests
        with self._probe.during(Operation.JOIN):
            donor = self._transfer.run(action, progress.head, has_state=not progress.lacks_params)
        if progress.lacks_params:
            agreement.publish_digest(progress.head - 1, NO_DIGEST)
            return
        digests.compute()
        digests.compute_rest(copied_from=None if donor is None else donor.group)
        if donor is not None:
            with self._probe.during(Operation.JOIN):
                confirm(digests.value.params, action, progress.head, agreement, self._join_timeout_s, self._probe)
            self._reports.send(GroupRejoined(member=agreement.member, step=action.step))
        else:
            agreement.publish_digest(progress.head - 1, digests.value.params)
        # Only now: a group whose state was refused does not take part, and its digest must not be journaled.
        digests.write(action.step, progress.num_restarts)
        progress.num_steps = action.step

    def restart(self, action: LoadCheckpoint) -> None:
        """Loads state after a wipe-out; the first vote compares it.

        Collective over: all ranks of the group. Raises `JoinFailed` if the state cannot be loaded.
        """
        member, progress = self._agreement.member, self._progress
        self._loader.load(action, member, progress.head)
        progress.step, progress.num_steps = None, action.step
        self._digests.check(action.step, progress.num_restarts)
        record = self._loader.record(member, action)
        self._reports.write_if_leader(record)
        rejected = tuple(record.rejected)
        self._reports.send(
            GroupRestarted(member=member, step=action.step, source=record.loaded_from, rejected=rejected)
        )
