"""What the codec writes is what the json module writes, and comes back equal, whatever the values are."""

import json
import re
from dataclasses import asdict, fields
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spare_megatron.core.log.entries import VERSION, Entry, decode_entry, encode_entry
from spare_megatron.core.log.votes import Vote
from spare_megatron.formats.codec import decode, encode, set_fields
from spare_megatron.journal.files import KINDS, Line, decode_line, encode_line

DRAWN = settings(max_examples=60, deadline=None, derandomize=True)
VALUE = st.none() | st.integers() | st.floats() | st.text(st.characters()) | st.lists(st.integers())
OBJECT = st.dictionaries(st.text(), VALUE)
OPEN = dict.fromkeys(("digests", "boundaries", "sums"), st.lists(st.lists(VALUE))) | {
    **dict.fromkeys(("faults", "pending"), st.lists(OBJECT)),
    **dict.fromkeys(("entry", "own"), OBJECT),
    "likes": st.dictionaries(st.text(), OBJECT),
}
"""Fields of records whose types say little."""


def read(values: object) -> Any:
    """As the json module writes and reads it; NaN is no JSON and equals nothing."""
    return repr(json.loads(json.dumps(values, sort_keys=True)))


def shown(value: object) -> str:
    """Also of NaN, which equals nothing. -0.0 equals a default of 0.0, and is left out as that."""
    return re.sub(r"(?<![\w.])-0\.0(?!\d)", "0.0", repr(value))


@pytest.mark.parametrize("kind", [*get_args(Entry), Vote])
@given(data=st.data())
@DRAWN
def test_entries_and_votes_hold_what_is_set_and_come_back(kind: type[Any], data: st.DataObject) -> None:
    value = data.draw(st.from_type(kind))
    head = {} if kind is Vote else {"entry": kind.__name__.lower(), "version": VERSION}
    usual = {field.name: field.default for field in fields(kind)}
    text = encode(set_fields(value)) if kind is Vote else encode_entry(value)
    found = {name: of for name, of in asdict(value).items() if getattr(value, name) != usual[name]}
    assert read(json.loads(text)) == read(head | found)
    assert shown(decode(text, Vote) if kind is Vote else decode_entry(text)) == shown(value)


@pytest.mark.parametrize("name", KINDS)
@given(data=st.data())
@DRAWN
def test_every_kind_of_record_comes_back_from_a_line_of_ascii(name: str, data: st.DataObject) -> None:
    kind = KINDS[name]
    drawn: dict[str, Any] = {field.name: OPEN.get(field.name, ...) for field in fields(kind)}
    record = data.draw(st.builds(kind, **drawn))
    line = Line(source="rank", at_s=data.draw(st.sampled_from([0.0, 1e-6, 1.5, 1e16])), record=record)
    text = encode_line(line)
    assert text.isascii()
    assert "\n" not in text
    assert read(json.loads(text)) == read({"record": name, "source": "rank", "at_s": line.at_s, **asdict(record)})
    assert repr(decode_line(text)) == repr(line)


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", "[" * 10**5, '{"is_complete":true}', '{"is_complete":1,"plan_digest":""}'),
        *(f'{{"is_complete":true,"plan_digest":"",{more}}}' for more in ('"pace":1', '"sums":[["a",NaN,1]]')),
    ],
)
def test_what_is_no_value_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        decode(text, Vote)
