"""Digests of a group's state: its ranks agree on them, its journal records them, its votes carry them."""

from dataclasses import replace

from spare_megatron.core.log.votes import Digests
from spare_megatron.core.machines.failure_detector import Operation
from spare_megatron.journal.records import ParamsRecord
from spare_megatron.mcore.gradients.digests import TensorsDigest
from spare_megatron.stacking.layout import GroupId
from spare_megatron.state.rank_context import RankContext


class StateDigests:
    """One rank's part in its group's digests, every `train.params_check_every_steps` and after recoveries and saves."""

    def __init__(self, ctx: RankContext) -> None:
        self._ctx = ctx
        self._every_steps = ctx.config.train.params_check_every_steps
        self.value = Digests()
        """Digests of the present state; empty where it is not compared."""
        self._rest: dict[int, TensorsDigest] | None = None
        self._copied_from: GroupId | None = None
        self.is_wanted = False
        """Compare as soon as all parameters are here: after a loss, for a save, before a host drops a copy."""
        self._after_save = 0  # committed steps after the update that follows a save

    def check_saved(self, step: int) -> None:
        """Has the saved state compared in the next vote and after the next update, in which a change while it was
        copied shows; lacking parameters once they are here. Collective over: all ranks of the group.
        """
        self._after_save = step + 1
        if self._ctx.progress.lacks_params:
            self.is_wanted = True
        elif not self.value.params:
            self.check(step)

    def forget(self) -> None:
        """The state has changed."""
        self.value = Digests()

    def compare_if_due(self, step: int) -> None:
        """Has the next vote compare the parameters if due or wanted. Collective over: all ranks of the group."""
        self.forget()
        is_due = step == self._after_save or (self._every_steps and step % self._every_steps == 0)
        if self.is_wanted or is_due:
            self.check(step)
        self.is_wanted = False

    def compute(self) -> None:
        """Computes the digests of the present state. Collective over: all ranks of the group."""
        state, trainer = self._ctx.optimizer_state, self._ctx.trainer
        with self._ctx.probe.during(Operation.CHECK):
            found = trainer.by_position(lambda slab: [trainer.params_digest(slab), *state.digests()])
            own = {position: [digest.hexdigest() for digest in of_slab] for position, of_slab in found.items()}
        with self._ctx.probe.during(Operation.SETTLE):
            params, *others = self._ctx.agreement.combine_digests(own)
        self.value = Digests(params=params, partitions=state.reported(others))

    def compute_rest(self, *, copied_from: GroupId | None = None) -> None:
        """The next vote also carries a digest of all other state, computed meanwhile. `copied_from`: its donor."""
        with self._ctx.probe.during(Operation.CHECK):
            self._rest = self._ctx.optimizer_state.digest_of_rest()
        self._copied_from = copied_from

    def for_vote(self) -> Digests:
        """The digests for the next vote. Collective over: all ranks of the group."""
        if self._rest is not None:
            with self._ctx.probe.during(Operation.CHECK):
                own = {position: [digest.hexdigest()] for position, digest in self._rest.items()}
            with self._ctx.probe.during(Operation.SETTLE):
                [state] = self._ctx.agreement.combine_digests(own)
            self.value = replace(self.value, state=state, copied_from=self._copied_from)
            self._rest = None
        return self.value

    def write(self, step: int, sha256: str = "") -> None:
        """Journals the digests as those after `step` committed steps."""
        record = ParamsRecord(
            group=self._ctx.member.group,
            step=step,
            digest=self.value.params,
            sha256=sha256,
            num_restarts=self._ctx.progress.num_restarts,
            slices={str(digest.partition): digest.value for digest in self.value.partitions},
        )
        self._ctx.write_if_leader(record)

    def check(self, step: int) -> None:
        """Has the next vote compare all state, and journals the digests. Collective over: all ranks of the group."""
        self.compute()
        self.compute_rest()
        self.write(step)

    def end(self, step: int, *, has_sha256: bool) -> None:
        """Journals the last digests. Collective over: all ranks of the group."""
        if self.value.params and not has_sha256:
            return
        if not self.value.params:
            self.compute()
        sha256 = ""
        if has_sha256:
            with self._ctx.probe.during(Operation.CHECK):
                own = self._ctx.trainer.by_position(lambda slab: [self._ctx.trainer.params_sha256(slab)])
            with self._ctx.probe.during(Operation.SETTLE):
                [sha256] = self._ctx.agreement.combine_digests(own)
        self.write(step, sha256)
