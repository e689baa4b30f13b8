"""What a journal must say of audits."""

from spare_megatron.journal.proofs.audit_history import _missing
from spare_megatron.journal.records import AuditRecord, ContributionRecord


def test_a_member_must_have_voted_on_audits_and_a_group_that_was_lost_before_its_vote_need_not() -> None:
    contributions = [
        ContributionRecord(group=group, step=3, attempt=4, epoch=0, members=[0, 1, 2], microbatches={}, kept=[])
        for group in range(3)
    ]
    found = [AuditRecord(group=group, step=3, attempt=4, digests=[], num_added=0) for group in (1, 2)]
    assert list(_missing(found, contributions, {1, 2})) == []
    assert list(_missing(found, contributions, {0, 1, 2})) == [
        ("unknown", "the journal lacks what group 0 has voted about audits")
    ]
