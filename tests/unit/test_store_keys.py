"""The keys of the control store stand in one module."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.store import keys

PACKAGE = Path(keys.__file__).parents[1]
MEMBER = Member(GroupId(3), 2)
METHODS = {"put", "put_if_absent", "put_counted", "counted", "beat", "get", "exists", "wait", "delete", "rendezvous"}


def starts_of_texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of every string; of an f-string what stands before its first field."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr) and node.values and isinstance(node.values[0], ast.Constant):
            yield node.lineno, str(node.values[0].value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def texts_passed_to_stores(tree: ast.AST) -> Iterator[int]:
    """Lines of calls of a control store whose key is spelled on the spot."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
            owner = node.func.value
            name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
            if name.endswith("store") and node.args:
                named = node.args[0].elts if isinstance(node.args[0], ast.List) else [node.args[0]]
                if any(isinstance(key, ast.JoinedStr | ast.Constant) for key in named):
                    yield node.lineno


def test_no_other_module_spells_a_key_of_the_control_store() -> None:
    own = ast.parse(Path(keys.__file__).read_text())
    spelled = {text for _, text in starts_of_texts(own) if re.fullmatch(r"[a-z]+/|[a-z]+_[a-z_]+", text)}
    assert {"beat/", "log/", "save/", "num_ready_reports"} <= spelled
    found = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path != Path(keys.__file__)
        for tree in [ast.parse(path.read_text())]
        for line in [*(line for line, text in starts_of_texts(tree) if text in spelled), *texts_passed_to_stores(tree)]
    ]
    assert found == []


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (keys.RUN_NAME, "name"),
        (keys.ALL_GROUPS_READY, "all_groups_ready"),
        (keys.NUM_READY_REPORTS, "num_ready_reports"),
        (keys.DATA_DIGEST, "data-digest"),
        (keys.PLAIN_WORLD, "plain"),
        (keys.ready(MEMBER.group), "ready/3"),
        (keys.ready_report(MEMBER.group, "node 1"), "ready_report/3/node 1"),
        (keys.entry(17), "log/0000000017"),
        (keys.broken(17), "broken/17"),
        (keys.votes(7, MEMBER), "vote/7/3/2"),
        (keys.num_votes(7), "votes/7"),
        (keys.relay(MEMBER), "relay/3/2"),
        (keys.waiting(MEMBER.group), "waiting/3"),
        (keys.restart(MEMBER.group), "restart/3"),
        (keys.digest(17, MEMBER.group), "digest/17/3"),
        (keys.beat(1), "beat/1"),
        (keys.supervisor_incarnation(1), "life/1"),
        (keys.group_incarnation(MEMBER.group), "incarnation/3"),
        (keys.assignment(17), "assignment/0000000017"),
        (keys.last_beat(1), "silent/1"),
        (keys.part_ready(MEMBER, 1), "part/3/2/1"),
        (keys.part_fenced(MEMBER), "lost/3/2"),
        (keys.piece_server(MEMBER, 5), "pieces/3/2/5"),
        (keys.snapshot_server(MEMBER, 5), "keeper/3/2/5"),
        (keys.world(MEMBER), "world/3/2"),
        (keys.communicator(17, 5), "communicator/17/5"),
        (keys.save_begun(17), "save/17/begun"),
        (keys.save_over(17), "save/17/over"),
        (keys.save_shares(17, MEMBER), "save/17/3/2"),
        (keys.site_incarnation(1, 4), "site/1/4"),
        (keys.lease(1), "lease/1"),
        (keys.speaker(1), "speaker/1"),
        (keys.arrival(7, 1, 4), "arrival/7/1/4"),
        (keys.done(7, 2, 1, 4), "done/7/2/1/4"),
    ],
)
def test_the_keys_stay_what_they_were(key: str, text: str) -> None:
    """They are shown to people who list the keys of an etcd."""
    assert key == text
