"""A journal followed as it grows."""

from pathlib import Path

from spare_megatron.journal.files import Line, encode_line
from spare_megatron.journal.records import EndRecord, LossRecord
from spare_megatron.journal.state.follow import JournalTail

END = Line(source="driver", at_s=2.0, record=EndRecord(outcome="finished", reason=""))
LOSS = Line(source="group-0001-rank-0", at_s=1.0, record=LossRecord(group=1, rank=0, cause="", entry_index=0))


def test_a_reader_that_sees_the_end_of_the_run_has_all_that_was_written_before(tmp_path: Path) -> None:
    """A rank writes its last line while the files are looked at, and then the driver writes that all have ended."""
    files = {line.source: tmp_path / "journal" / f"{line.source}.jsonl" for line in (LOSS, END)}
    tail = JournalTail(tmp_path)
    assert list(tail.poll()) == []
    files["driver"].parent.mkdir()
    files[LOSS.source].touch()
    files["driver"].write_text(encode_line(END) + "\n")
    lines = tail.poll()
    assert next(lines) == END
    files[LOSS.source].write_text(encode_line(LOSS) + "\n")
    assert list(lines) == [LOSS]
    assert tail.sources == files.keys()
    assert list(tail.poll()) == []
