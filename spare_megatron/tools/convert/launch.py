"""Reads a launch: a shell script, which is never executed, a file of arguments, or a YAML of them."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

_SCRIPT = re.compile(r"(?:.*/)?pretrain_gpt\.py")
_NESTED = r"(?:[^()]|\((?:[^()]|\([^()]*\))*\))*"
_VARIABLE = rf"\$\((?:{_NESTED})\)|`[^`]*`|\$\{{[^}}]*\}}|\$[A-Za-z_]\w*|\$[0-9@*#?]"
_WORD = rf"""(?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|{_VARIABLE}|[^\s;&|<>()'"\\#]|(?<=\S)\#)+"""
_TOKEN = re.compile(
    rf"(?P<comment>(?<!\S)\#[^\n]*)|(?P<redirection>\d*(?:>>?|<)(?:&[\d-]|\s*{_WORD}))"
    rf"|(?P<array>[A-Za-z_]\w*\+?=\()|(?P<word>{_WORD})|(?P<end>\n|;|&&?|\|\|?)|(?P<parenthesis>[()])"
)
_PIECE = re.compile(rf"'([^']*)'|\"((?:\\.|[^\"\\])*)\"|\\(.)|({_VARIABLE})")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_REFERENCE = re.compile(r"\$\{?([A-Za-z_]\w*|[0-9@*#?])(?:\[[@*]\])?(?:(:?-)(.*))?\}?", re.DOTALL)
_UNKNOWN = re.compile("\0([^\0]*)\0")
_BEGIN, _END = {"if", "for", "while", "until", "case"}, {"fi", "done", "esac"}
_LEADING = {"then", "else", "do", "exec", "time", "export", "declare", "local", "readonly", "{"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The words of a launch: what stands before the script's name, and its arguments.

    Attributes:
        environment: Variables that it exports, which a preset does not have.
    """

    launcher: tuple[str, ...] = ()
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


def read_launch(file: Path, defined: Mapping[str, str]) -> Launch:
    """The launch in a file. Raises ValueError for variables that neither the file nor `defined` sets."""
    text = file.read_text(encoding="utf-8")
    if file.suffix in (".yaml", ".yml"):
        return _of_yaml(file, text, defined)
    shell = _Shell(variables={name: [value] for name, value in defined.items()}, fixed=frozenset(defined))
    launches = [launch for words in _commands(text, shell) if (launch := _of_words(words))]
    if not launches and re.match(r"\s*--", text):
        launches = [Launch(arguments=tuple(_expanded(text, shell)))]
    if len(launches) != 1:
        raise ValueError(f"{file} launches pretrain_gpt.py {len(launches)} times; name a script that does it once")
    launch = launches[0]
    _require_known(file, (*launch.launcher, *launch.arguments))
    environment = {name: _UNKNOWN.sub("", " ".join(shell.variables[name])) for name in shell.exported}
    return Launch(launcher=launch.launcher, arguments=launch.arguments, environment=environment)


def _of_words(words: Sequence[str]) -> Launch | None:
    words = [part for word in words for part in (word.split() if "pretrain_gpt.py " in word else [word])]
    index = next((index for index, word in enumerate(words) if _SCRIPT.fullmatch(word)), None)
    if index is None or words[0] in ("echo", "[", "[[", "test"):
        return None
    return Launch(launcher=tuple(words[:index]), arguments=tuple(words[index + 1 :]))


def _require_known(file: Path, words: Sequence[str]) -> None:
    if unknown := sorted({name for word in words for name in _UNKNOWN.findall(word)}):
        names = ", ".join(unknown)
        raise ValueError(f"{file}: the value of {names} is not known; give --define {unknown[0]}=VALUE")


def _of_yaml(file: Path, text: str, defined: Mapping[str, str]) -> Launch:
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
    _require_known(file, words)
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
    depth: int = 0
    """Of conditions and loops, in which an assignment may not happen."""

    def assign(self, name: str, words: list[str], *, adds: bool) -> None:
        if name in self.fixed:
            return
        if self.depth:
            words, adds = [f"\0{name}\0"], False
        if words == ["\0$\0"]:  # the output of a command
            words = [f"\0{name}\0"]
        self.variables[name] = [*self.variables.get(name, []), *words] if adds else words

    def value(self, reference: str) -> list[str]:
        match = _REFERENCE.fullmatch(reference)
        if match is None or reference.startswith("$("):
            return ["\0$\0"]
        name, default = match[1], match[3]
        if name in self.variables:
            return self.variables[name]
        return [f"\0{name}\0"] if default is None else [self.inside(default.rstrip("}").strip("\"'"))]

    def words(self, reference: str) -> list[str]:
        """The elements of an array; one that is defined from outside is split like a command."""
        is_fixed = re.sub(r"\W", "", reference) in self.fixed
        return shlex.split(self.value(reference)[0]) if is_fixed else self.value(reference)

    def inside(self, text: str) -> str:
        """What double quotes hold, expanded."""
        text = re.sub(_VARIABLE, lambda match: " ".join(self.value(match[0])), text)
        return re.sub(r"\\([\\\"$`])", r"\1", text)

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
            elif match["parenthesis"] == ")":
                shell.assign(array[0].rstrip("+"), array[1], adds=array[0].endswith("+"))
                array = None
        elif match["array"]:
            array = (match["array"][:-2], [])
        elif match["word"]:
            command.append(match["word"])
        elif match["end"] or match["parenthesis"]:
            if words := _executed(command, shell):
                yield words
            command = []


def _executed(command: list[str], shell: _Shell) -> list[str]:
    """The expanded words of a command; none of one that only assigns."""
    is_export = False
    while command and (command[0] in _LEADING or command[0] in _BEGIN or command[0] in _END):
        first, *command = command
        is_export |= first == "export"
        shell.depth += (first in _BEGIN) - (first in _END)
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
    return [part for word in command for part in shell.expand(word)]
