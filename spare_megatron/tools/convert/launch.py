"""Reads a launch: a shell script, which is never executed, a file of arguments, or a YAML of them."""

import re
import shlex
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

from spare_megatron.tools.convert.arguments import read_arguments

_SCRIPT = re.compile(r"(?:.*/)?pretrain_gpt\.py")
_NESTED = r"(?:[^()]|\((?:[^()]|\([^()]*\))*\))*"
_DEFAULTS = r"\$\{(?:[^{}]|\$\{(?:[^{}]|\$\{[^{}]*\})*\})*\}"
_VARIABLE = rf"\$\((?:{_NESTED})\)|`[^`]*`|{_DEFAULTS}|\$[A-Za-z_]\w*|\$[0-9@*#?]"
_QUOTED = rf"(?>\\.|{_VARIABLE}|[^\"\\])*"
_WORD = rf"""(?:'[^']*'|"{_QUOTED}"|\\.|{_VARIABLE}|[^\s;&|<>()'"\\#]|(?<=\S)\#)+"""
_TOKEN = re.compile(
    rf"(?P<blank>(?<!\S)\#[^\n]*|(?<=&&|\|\|)(?:\s|\#[^\n]*)+)|(?P<redirection>\d*(?:>>?|<)(?:&[\d-]|\s*{_WORD}))"
    rf"|(?P<array>[A-Za-z_]\w*\+?=\()|(?P<word>{_WORD})|(?P<operator>&&|\|\||[\n;&|()])"
)
_PIECE = re.compile(rf"'([^']*)'|\"({_QUOTED})\"|\\(.)|({_VARIABLE}|[$`\"'])")
_INSIDE = re.compile(rf"\\([\\\"$`])|{_VARIABLE}|[$`]")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_REFERENCE = re.compile(r"\$(\{)?([A-Za-z_]\w*|[0-9@*#?])(?(1)(?:\[[@*]\])?(?:(:?-)(.*))?\})", re.DOTALL)
_UNKNOWN = re.compile("\0([^\0]*)\0")
_OUTPUT = "\0$\0"
"""Stands for an expansion that only bash makes, such as the output of a command."""
_LOOPS, _LISTS = {"for": "done", "while": "done", "until": "done"}, {"&&": ";", "||": ";"}
_CLOSER = {"if": "fi", "case": "esac", "{": "}", "(": ")", **_LOOPS, **_LISTS}
_COMPOUND = {*_CLOSER, *_CLOSER.values()}
_SETTERS = {"read", "let", "unset", "mapfile", "readarray", "getopts"}
_LEADING = {"then", "else", "do", "exec", "time", "export", "declare", "local", "readonly"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The words of a launch: what stands before the script's name, and its arguments.

    Attributes:
        environment: Variables that it exports, which a preset does not have.
    """

    launcher: tuple[str, ...] = ()
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


def read_launch(file: Path, defined: Mapping[str, str], further: Sequence[str] = ()) -> Launch:
    """The launch in a file. Raises ValueError for variables that neither the file nor `defined` sets, and for values
    that only running the script shows, unless `further`, which has later arguments, gives the argument anew.
    """
    given = read_arguments(further)
    text = file.read_text(encoding="utf-8")
    if file.suffix in (".yaml", ".yml"):
        return _of_yaml(file, text, defined, given)
    shell = _Shell(variables={name: [value] for name, value in defined.items()}, fixed=frozenset(defined))
    launches = [launch for words in _commands(text, shell) if (launch := _of_words(words))]
    if not launches and re.match(r"\s*--", text):
        launches = [Launch(arguments=tuple(_expanded(text, shell)))]
    if len(launches) != 1:
        raise ValueError(f"{file} launches pretrain_gpt.py {len(launches)} times; name a script that does it once")
    launch = launches[0]
    _require_known(file, (*launch.launcher, *launch.arguments), given)
    environment = {name: _UNKNOWN.sub("", " ".join(shell.variables[name])) for name in shell.exported}
    return Launch(launcher=launch.launcher, arguments=launch.arguments, environment=environment)


def _of_words(words: Sequence[str]) -> Launch | None:
    parts = [part for word in words for part in (word.split() if "pretrain_gpt.py " in word else [word])]
    index = next((index for index, part in enumerate(parts) if _SCRIPT.fullmatch(part)), None)
    if index is None or parts[0] in ("echo", "[", "[[", "test"):
        return None
    arguments = parts[index + 1 :]
    if len(parts) > len(words):  # of a command in quotes, whose own shell expands it once more
        arguments = [_OUTPUT if re.search("[$`]", part) else part for part in arguments]
    return Launch(launcher=tuple(parts[:index]), arguments=tuple(arguments))


def _require_known(file: Path, words: Sequence[str], given: Container[str]) -> None:
    if unknown := sorted({name for word in words for name in _UNKNOWN.findall(word) if name != "$"}):
        names = ", ".join(unknown)
        raise ValueError(f"{file}: the value of {names} is not known; give --define {unknown[0]}=VALUE")
    argument = ""
    for before, word in pairwise(["", *words]):
        if word.startswith("--"):
            argument = word.partition("=")[0]
        if _OUTPUT not in word:
            continue
        if not argument or (word == _OUTPUT and before != argument):  # it may be several words, arguments among them
            place = f"behind {argument}" if argument else "of the launcher"
            raise ValueError(f"{file}: only running it shows a word {place}; write that out in a copy of the file")
        if argument.removeprefix("--").replace("-", "_") not in given:
            raise ValueError(f"{file}: only running it shows the value of {argument}; give {argument} VALUE behind --")


def _of_yaml(file: Path, text: str, defined: Mapping[str, str], given: Container[str]) -> Launch:
    try:
        yaml = import_module("yaml")
    except ImportError as error:
        raise ValueError(f"{file}: reading YAML needs PyYAML: pip install pyyaml") from error
    try:
        table = yaml.load(text, Loader=yaml.BaseLoader)  # whose scalars are texts
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(table, dict) or not isinstance(rows := table.get("MODEL_ARGS", table), dict):
        raise ValueError(f"{file} has no table of arguments, such as MODEL_ARGS")
    if others := [key for key in table if str(key).startswith("MODEL_ARGS_")]:
        raise ValueError(f"{file} has several launches: MODEL_ARGS and {others[0]}; copy the one to convert")
    rows = {**rows.pop("<<", {}), **rows}
    environment = {str(name): str(value) for name, value in (table.get("ENV_VARS") or {}).items()}
    variables = {name: [value] for name, value in {**environment, **defined}.items()}
    shell = _Shell(variables=variables, fixed=frozenset(defined))
    words: list[str] = []
    for name, value in rows.items():
        words.append(f"--{str(name).lstrip('-')}")
        words += _yaml_words(value, shell)
    _require_known(file, words, given)
    return Launch(arguments=tuple(words), environment=environment)


def _yaml_words(value: Any, shell: "_Shell") -> Iterator[str]:
    """The words of a value as Megatron-LM's functional tests make them: none of true, several of [a b], else one."""
    for text in value if isinstance(value, list) else [str(value)]:
        if text.startswith("[") and text.endswith("]"):
            yield from text[1:-1].replace(",", " ").split()
        elif text != "true":
            yield from [shell.inside(text)] if " " in text else shell.expand(text)


# --------------------------------------------------------------------------------------------------------- shell


@dataclass(slots=True)
class _Shell:
    """Variables, each a list of words; a value that is not known holds the variable's name between two NULs."""

    variables: dict[str, list[str]]
    fixed: frozenset[str]
    exported: list[str] = field(default_factory=list)
    closers: list[str] = field(default_factory=list)
    """What closes the compound commands, and the lists joined by && or ||, that are open, the innermost last."""

    def open_or_close(self, sign: str) -> None:
        if sign in _CLOSER:
            self.closers.append(_CLOSER[sign])
            return
        while self.closers and self.closers[-1] == ";":  # whatever ends a command but a pipe ends a list
            self.closers.pop()
        if self.closers and self.closers[-1] == sign:
            self.closers.pop()

    def assign(self, name: str, words: list[str], *, adds: bool) -> None:
        if name in self.fixed:
            return
        unknown = f"\0{name}\0"
        if {*self.closers} - {"}", ")"}:  # it may not happen
            words, adds = [unknown], False
        if not any("--" in word for word in words):  # else it has arguments, each of which can be given by itself
            words = [word.replace(_OUTPUT, unknown) for word in words]
        self.variables[name] = [*self.variables.get(name, []), *words] if adds else words

    def forget(self, words: list[str]) -> None:
        """Takes variables for unknown that a command may set, which has their names at the beginnings of its words."""
        for name in {match[0] for word in words if (match := re.match(r"[A-Za-z_]\w*", word.lstrip("'\"")))}:
            self.assign(name, [f"\0{name}\0"], adds=False)

    def value(self, reference: str) -> list[str]:
        match = _REFERENCE.fullmatch(reference)
        if match is None:
            return [_OUTPUT]
        name, operator, default = match.groups()[1:]
        found = self.variables.get(name)
        if found is not None and (operator != ":-" or any(found)):
            return found
        return [f"\0{name}\0"] if default is None else [" ".join(self.expand(default))]

    def words(self, reference: str) -> list[str]:
        """The elements of an array; one that is defined from outside is split like a command."""
        is_fixed = re.sub(r"\W", "", reference) in self.fixed
        return shlex.split(self.value(reference)[0]) if is_fixed else self.value(reference)

    def inside(self, text: str) -> str:
        """What double quotes hold, expanded."""
        return _INSIDE.sub(lambda match: match[1] or " ".join(self.value(match[0])), text)

    def expand(self, word: str) -> list[str]:
        """The words that one word of a script becomes."""
        found, text, end, is_quoted = [""], word, 0, False
        for match in _PIECE.finditer(text):
            found[-1] += text[end : match.start()]
            end = match.end()
            single, double, escaped, reference = match.groups()
            if reference is None:
                is_quoted = True
                is_list = double is not None and re.fullmatch(r"\$\{\w+\[@\]\}", double)
                parts = self.words(double) if is_list else [single or escaped or self.inside(double or "")]
            else:
                parts = [part for value in self.value(reference) for part in value.split()]
            found[-1] += parts[0] if parts else ""
            found += parts[1:]
        found[-1] += text[end:]
        return found if is_quoted else [part for part in found if part]


def _expanded(text: str, shell: _Shell) -> list[str]:
    tokens = _TOKEN.finditer(text.replace("\\\n", " "))
    return [part for match in tokens if match["word"] for part in shell.expand(match["word"])]


def _commands(text: str, shell: _Shell) -> Iterator[list[str]]:
    """The words of each command, expanded; assignments have been made by then."""
    command: list[str] = []
    array: tuple[str, list[str]] | None = None
    for match in _TOKEN.finditer(text.replace("\\\n", " ") + "\n"):
        if array is not None:
            if match["word"]:
                array[1].extend(shell.expand(match["word"]))
            elif match["operator"] == ")":
                shell.assign(array[0].rstrip("+"), array[1], adds=array[0].endswith("+"))
                array = None
        elif match["array"]:
            array = (match["array"][:-2], [])
        elif match["word"]:
            command.append(match["word"])
        elif operator := match["operator"]:
            if words := _executed(command, shell):
                yield words
            command = []
            if operator != "|":
                shell.open_or_close(operator)


def _executed(command: list[str], shell: _Shell) -> list[str]:
    """The expanded words of a command; none of one that only assigns."""
    is_export = False
    while command and (command[0] in _LEADING or command[0] in _COMPOUND or command[0].startswith("-")):
        first, *command = command
        is_export |= first == "export"
        if first in _COMPOUND:
            shell.open_or_close(first)
        if first == "for":
            shell.forget(command[:1])
    while command and (match := _ASSIGNMENT.fullmatch(command[0])):
        name, adds, value = match.groups()
        words = shell.expand(value) or [""]
        joined = [" ".join(words)]
        if adds:
            joined = [" ".join([*shell.variables.get(name, []), *joined])]
        shell.assign(name, joined, adds=False)
        if is_export:
            shell.exported.append(name)
        command = command[1:]
    if command and (command[0] in _SETTERS or command[:2] == ["printf", "-v"]):
        shell.forget(command[1:])
    return [part for word in command for part in shell.expand(word)]
