"""The arguments of Megatron-LM's `pretrain_gpt.py`: what each becomes here, and how it is read. Loads without torch.

The table is `arguments.toml`. A name is the flag without dashes, with `_` for `-`.
"""

import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spare_megatron.config.megatron_fields import HONOURED, IGNORED, OURS_IN_MEGATRON_WORDS, REFUSED, is_off


@dataclass(frozen=True, slots=True)
class Taken:
    kind: str
    default: Any
    setting: str
    is_copied: bool


_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def _taken(text: str) -> Taken:
    short, default, setting = text.split(" ", 2)
    kinds = {"int": "a whole number", "ints": "three whole numbers", "float": "a number", "str": "a text"}
    kind = (kinds | {"json": "JSON"}).get(short, short)
    off = False if kind == "flag" else None
    return Taken(kind, off if default == "-" else default, setting.lstrip("="), setting.startswith("="))


def _patterns(table: Mapping[str, str]) -> tuple[tuple[re.Pattern[str], str], ...]:
    return tuple((re.compile("|".join(names.split())), reason) for reason, names in table.items())


TAKEN: Mapping[str, Taken] = {name: _taken(text) for name, text in _TABLE["taken"].items()}
IMPLIED = {name: reason for reason, names in _TABLE["implied"].items() for name in names.split()}
WITHOUT_EFFECT, MISSING = _patterns(_TABLE["without_effect"]), _patterns(_TABLE["missing"])
HARMLESS: Mapping[str, str] = _TABLE["harmless"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Given arguments, each with its words; those that are absent have Megatron's defaults.

    Attributes:
        defaults: Those of the installed Megatron, which go before the table's.
    """

    given: Mapping[str, Sequence[str]]
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        """The value by the type of the table. Raises ValueError."""
        row = TAKEN[name]
        if name in self.given:
            return _value(name, row.kind, self.given[name])
        default = row.default if row.kind == "flag" else self.defaults.get(name, row.default)
        return default if default in (None, False) else _value(name, row.kind, [str(default)])

    def written(self, name: str) -> str:
        return " ".join([f"--{name.replace('_', '-')}", *self.given.get(name, ())])


_KINDS: Mapping[str, Callable[[str], Any]] = {
    "a whole number": int,
    "a number": float,
    "a text": str,
    "JSON": lambda word: json.loads(word.replace("(", "[").replace(")", "]")),
}


def _value(name: str, kind: str, words: Sequence[str]) -> Any:
    if kind == "words":
        return list(words)
    expected = {"flag": 0, "three whole numbers": 3}.get(kind, 1)
    if len(words) != expected:
        takes = ("no value", "one value", "", "three values")[expected]
        raise ValueError(f"{name}: it takes {takes}, not {len(words)}; correct it")
    try:
        return [int(word) for word in words] if expected == 3 else _KINDS[kind](words[0]) if words else True
    except ValueError as error:
        raise ValueError(f"{name}: {' '.join(words)!r} is not {kind}; correct it") from error


def megatron_value(words: Sequence[str]) -> Any:
    """The value of a field of `[megatron]` that is not in the table."""
    values = []
    for word in words:
        try:
            values.append(_KINDS["JSON"](word))
        except ValueError:
            values.append(word)
    return True if not values else values[0] if len(values) == 1 else values


@dataclass(frozen=True, slots=True)
class Class:
    """What becomes of an argument: taken, implied, without effect, or missing."""

    kind: str
    text: str


def class_of(name: str, args: Arguments) -> Class:
    """What becomes of a given argument, and the setting or the reason."""
    has_experts = args["num_experts"] is not None
    if name in TAKEN and (has_experts or not re.fullmatch(WITHOUT_EFFECT[-1][0], name)):
        return Class("taken", TAKEN[name].setting)
    if name in IMPLIED:
        return Class("implied", IMPLIED[name])
    value = megatron_value(args.given.get(name, ()))
    if str(value) == HARMLESS.get(name) or (name in REFUSED and is_off(name, value)):
        return Class("implied", f"{value} is what holds here")
    for pattern, reason in WITHOUT_EFFECT if not has_experts else WITHOUT_EFFECT[:-1]:
        if pattern.fullmatch(name):
            return Class("without effect", reason)
    for pattern, reason in MISSING:
        if pattern.fullmatch(name):
            return Class("missing", reason)
    if name in HONOURED:
        return Class("taken", f"megatron.{name}")
    if name in IGNORED:
        return Class("without effect", IGNORED[name])
    if name in REFUSED:
        return Class("missing", REFUSED[name])
    if name in OURS_IN_MEGATRON_WORDS:
        return Class("missing", f"it follows from {OURS_IN_MEGATRON_WORDS[name]}; set that instead")
    return Class("missing", "it is not known here; remove it if it does not change the training")


def read_arguments(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Each argument with its words; the last one of a name counts. Raises ValueError for words that belong to none."""
    given: dict[str, tuple[str, ...]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            flag, has_value, value = word[2:].partition("=")
            name = flag.replace("-", "_")
            given[name] = (value,) if has_value else ()
        elif not name:
            raise ValueError(f"{word!r} belongs to no argument; arguments begin with --")
        else:
            given[name] += (word,)
    return given
