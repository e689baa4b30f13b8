"""The user's command for events: it gets them, and neither its failures nor its slowness reach the training."""

import json
import re
import sys
import time
from pathlib import Path

import pytest

from spare_megatron.driver.event_command import EventCommand
from spare_megatron.journal.records import CulpritRecord, LossRecord
from spare_megatron.process.reports import (
    GroupLost,
    GroupRejoined,
    Message,
    StoreBack,
)
from spare_megatron.stacking.layout import GroupId, Member

pytestmark = pytest.mark.timeout(60)

CULPRIT = CulpritRecord(machine=3, cause="compute", of_group=2, rank=1, factor=2.0)
_APPEND = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read() + '\\n')"


def test_events_come_one_by_one_as_json(tmp_path: Path) -> None:
    failures: list[Message] = []
    command = EventCommand([sys.executable, "-c", _APPEND, str(tmp_path / "events")], tmp_path, failures.append)
    command.on_event(CULPRIT)
    command.on_event(StoreBack(away_s=1.0))  # none of those that it gets
    command.on_event(GroupLost(record=LossRecord(group=1, rank=0, cause="SIGKILL", entry_index=0)))
    command.on_event(GroupRejoined(member=Member(GroupId(1), 1), step=7))
    command.close()
    assert failures == []
    events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    assert [event["event"] for event in events] == ["culprit", "group_lost", "group_rejoined"]
    assert {event["run_dir"] for event in events} == {str(tmp_path)}
    assert (events[0]["machine"], events[0]["cause"], events[0]["is_over"]) == (3, "compute", False)
    assert events[1]["cause"] == "SIGKILL"
    assert events[2]["step"] == 7


def test_whatever_bytes_a_command_prints_it_gets_the_next_event(tmp_path: Path) -> None:
    failures: list[Message] = []
    code = f"{_APPEND}; sys.stdout.buffer.write(bytes([255]))"
    command = EventCommand([sys.executable, "-c", code, str(tmp_path / "events")], tmp_path, failures.append)
    for _ in range(2):
        command.on_event(CULPRIT)
    command.close()
    assert failures == []
    assert len((tmp_path / "events").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["/no/such/command"], "No such file or directory"),
        (
            [sys.executable, "-c", "import sys; print('the pager is off', file=sys.stderr); sys.exit(3)"],
            "code 3: the pager",
        ),
        ([sys.executable, "-c", "import time; time.sleep(600)"], "timed out"),
    ],
    ids=["missing", "failing", "hanging"],
)
def test_a_failure_is_reported_once_with_its_reason(tmp_path: Path, command: list[str], reason: str) -> None:
    failures: list[Message] = []
    events = EventCommand(command, tmp_path, failures.append, timeout_s=2.0)
    for _ in range(2):
        events.on_event(CULPRIT)
    events.close()
    assert len(failures) == 1
    assert reason in failures[0].text
    assert failures[0].text.startswith(f"watch.on_event={command[0]}: ")


def test_a_command_that_hangs_blocks_neither_events_nor_for_long_the_end(tmp_path: Path) -> None:
    failures: list[Message] = []
    hanging = [sys.executable, "-c", "import time; time.sleep(600)"]
    events = EventCommand(hanging, tmp_path, failures.append, close_timeout_s=0.1)
    began_s = time.monotonic()
    for _ in range(1500):
        events.on_event(CULPRIT)
    events.close()
    assert time.monotonic() - began_s < 4.0
    assert sorted(failure.text.partition(": ")[2] for failure in failures)[0].startswith("it has not taken all events")
    assert re.search(r"too slow for (499|500) events", failures[-1].text), "a thousand waited"
