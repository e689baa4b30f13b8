"""A rank's part in audits: computes disputed microbatches, and agrees on the digests that its group votes with."""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

from spare_megatron.core.audits.audits import MicrobatchDigest, combined_digest
from spare_megatron.core.audits.suspects import MOST_NAMED
from spare_megatron.core.log.actions import ComputeAudits
from spare_megatron.journal.records import AuditRecord
from spare_megatron.stacking.plans import Microbatch, Numbered
from spare_megatron.state.rank_context import RankContext


class GroupAudits:
    """Carries out ComputeAudits, and makes the digests of votes from the digests that the trainer has taken."""

    def __init__(self, ctx: RankContext) -> None:
        self._ctx = ctx
        self._computed_for = -1  # attempt

    def compute(self, action: ComputeAudits) -> None:
        """Collective over: all ranks of the group."""
        now = self._ctx.progress.now
        now.has_audits = True
        asked = action.asked_of(self._ctx.member.group)
        if self._ctx.progress.lacks_params or not asked or self._computed_for == action.attempt:
            return
        self._computed_for = action.attempt
        self._ctx.trainer.audit(asked)
        now.questioned |= {one.microbatch for one in action.disputes if one.is_suspicion} & set(asked)
        now.audited = [*now.audited, *(one for one in asked if one not in now.audited)]

    def digests(self, attempt: int, disputed: Sequence[Microbatch]) -> tuple[MicrobatchDigest, ...]:
        """The group's digests of audited microbatches; those of disputed ones show what they are made of. Waits for the
        device. Collective over: all ranks of the group.
        """
        now = self._ctx.progress.now
        if not now.has_audits:
            return ()
        passes = self._ctx.trainer.passes
        of_ranks = self._ctx.agreement.gathered((passes.num_added, [passes.boundaries(one) for one in now.audited]))
        digests = []
        for number, microbatch in enumerate(now.audited):
            boundaries = tuple(sorted(one for _, of_rank in of_ranks for one in of_rank[number]))
            shown = boundaries if microbatch in disputed else ()
            digests.append(MicrobatchDigest(*microbatch, combined_digest(boundaries), shown))
        record = AuditRecord(
            group=self._ctx.member.group,
            step=now.step,
            attempt=attempt,
            digests=[[int(item.shard), item.index, f"{item.digest:016x}"] for item in digests],
            num_added=sum(num_added for num_added, _ in of_ranks),
            num_planned=now.num_planned,
            incarnation=self._ctx.member.incarnation,
            boundaries=[
                [int(item.shard), item.index, one.kind, one.stage, one.position, f"{one.digest:016x}"]
                for item in digests
                for one in item.boundaries
            ],
        )
        self._ctx.write_if_leader(record)
        return tuple(digests)

    def losses(self, disputed: Sequence[Microbatch], *, has_suspects: bool) -> tuple[MicrobatchDigest, ...]:
        """Likewise of losses: of suspects that it has counted, and of those it was asked about. Collective over: all
        ranks of the group, with the same arguments.
        """
        now = self._ctx.progress.now
        if not has_suspects and not now.questioned:
            return ()
        again = [(one, self._ctx.trainer.passes.boundaries(one)) for one in sorted(now.questioned)]
        of_ranks = self._ctx.agreement.gathered(
            (sorted(now.suspects), now.losses, self._ctx.trainer.audited_losses(), again)
        )
        suspects = sorted({one for units, *_ in of_ranks for one in units})[:MOST_NAMED]
        digests = [
            MicrobatchDigest(*one, _loss_digest(one, (counted for _, counted, *_ in of_ranks))) for one in suspects
        ]
        for place, (one, _) in enumerate(again):
            boundaries = tuple(sorted(found for *_, of_rank in of_ranks for found in of_rank[place][1]))
            digest = _loss_digest(one, (audited for _, _, audited, _ in of_ranks))
            digests.append(MicrobatchDigest(*one, digest, boundaries if one in disputed else ()))
        return tuple(digests)


def _loss_digest(unit: Microbatch, of_ranks: Iterable[Mapping[Numbered, float]]) -> int:
    """The 64-bit digest of the losses of a unit of work, over all its microbatches."""
    values = sorted(
        (item.number, loss.hex()) for of_rank in of_ranks for item, loss in of_rank.items() if item.unit == unit
    )
    return int.from_bytes(blake2b(repr(values).encode(), digest_size=8).digest(), "little")
