"""A user's program: a file whose functions fill the roles of the model, its forward pass and the data.

The driver reads the file, for its digest and the names that it defines, and never runs it; ranks import it.
"""

import ast
import contextlib
import hashlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from spare_megatron.config.schema import ProgramConfig

ROLES = ("model_provider", "forward_step", "datasets_provider")
"""Names of the functions of a program; a role that a file does not define has our default."""

LOSS_TERMS = "loss_terms"
"""Name of the mapping that declares further terms of the loss."""

_TAKEN = ("loss", "grad_norm", "learning_rate", "tokens")
"""Names of metrics `train/NAME` that every run has."""

MODULE = "spare_program"
"""Name under which ranks import the file: never `__main__`."""


class ProgramImported(BaseException):
    """The script has called `pretrain` while a rank imports it: all that the roles need is defined by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerm:
    """A further term of the loss: the mean that it adds is multiplied by `weight`; 0 only measures it."""

    weight: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramFile:
    """A program as it stands in its file. `names` are those that it defines, of `ROLES` and `LOSS_TERMS`."""

    path: Path
    source: bytes
    names: frozenset[str]

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.source).hexdigest()


def read_program(config: ProgramConfig) -> ProgramFile:
    """Reads the file of the settings. ValueError: it cannot be read, is no Python, or is no program or another one."""
    path = Path(config.file).absolute()
    try:
        source = path.read_bytes()
        tree = ast.parse(source, str(path))
    except OSError as error:
        raise ValueError(f"program.file={config.file} cannot be read: {error.strerror or error}; correct it") from error
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"program.file={config.file} is no Python: {error}; correct it") from error
    names = frozenset(_bound_names(tree.body)) & {*ROLES, LOSS_TERMS}
    if not names & {*ROLES}:
        raise ValueError(
            f"program.file={config.file} defines none of {', '.join(ROLES)} at its top level; name its functions so"
        )
    found = ProgramFile(path=path, source=source, names=names)
    if config.sha256 not in ("", found.sha256):
        raise ValueError(
            f"program.file={config.file} has SHA-256 {found.sha256}, not program.sha256={config.sha256}; use that "
            f"file, or clear program.sha256"
        )
    return found


def resolved_program(config: ProgramConfig) -> ProgramConfig:
    """The settings with the file's whole path and digest. ValueError: as `read_program`."""
    if not config.file:
        return config
    found = read_program(config)
    return replace(config, file=str(found.path), sha256=found.sha256)


def judge_program(config: ProgramConfig) -> tuple[frozenset[str], str]:
    """The names that the program defines, or why it cannot be used; neither without one."""
    try:
        return (read_program(config).names if config.file else frozenset()), ""
    except ValueError as error:
        return frozenset(), str(error)


def import_program(config: ProgramConfig) -> Mapping[str, Any]:
    """Runs the file as a module of this process; returns what it defines for each role and for `LOSS_TERMS`.

    A script ends at its call of `pretrain`. Modules beside the file can be imported, and hide no installed ones.
    ValueError: the file is not the one that the settings describe, or does not define what it seems to.
    """
    found = read_program(config)
    module = ModuleType(MODULE)
    module.__file__ = str(found.path)
    sys.modules[MODULE] = module
    if (folder := str(found.path.parent)) not in sys.path:
        sys.path.append(folder)
    with contextlib.suppress(ProgramImported):
        exec(compile(found.source, str(found.path), "exec", dont_inherit=True), module.__dict__)
    defined = {name: vars(module)[name] for name in (*ROLES, LOSS_TERMS) if vars(module).get(name) is not None}
    if defined.keys() != found.names:
        differ = ", ".join(sorted(defined.keys() ^ found.names))
        raise ValueError(
            f"program.file={config.file}: whether it defines {differ} depends on where it runs; define names of roles "
            f"at the top level, before a call of pretrain"
        )
    if uncallable := [name for name in ROLES if name in defined and not callable(defined[name])]:
        raise ValueError(f"program.file={config.file}: {', '.join(uncallable)} must be a function; correct it")
    _check_terms(defined.get(LOSS_TERMS, {}))
    return defined


def _check_terms(terms: object) -> None:
    """ValueError: the declaration of further terms is no mapping from fitting names to `LossTerm`."""
    items = terms.items() if isinstance(terms, Mapping) else [(terms, None)]
    for name, term in items:
        if not isinstance(term, LossTerm) or not re.fullmatch(r"[a-z][a-z0-9_]*", str(name)) or name in _TAKEN:
            raise ValueError(
                f"loss_terms has {name!r}: {term!r}; it maps names, of small letters, digits and _, to LossTerm, and "
                f"{', '.join(_TAKEN)} are taken"
            )


def _bound_names(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Names that the statements of a module bind; those below `if __name__ == ...` are bound in the script alone."""
    for statement in body:
        match statement:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                yield from (alias.asname or alias.name.partition(".")[0] for alias in aliases)
            case ast.Assign(targets=targets):
                yield from (node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()):
                yield name
            case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
                pass
            case ast.If(body=inner, orelse=other):
                yield from _bound_names([*inner, *other])
            case ast.With(body=inner):
                yield from _bound_names(inner)
            case ast.Try(body=inner, handlers=handlers, orelse=other, finalbody=final):
                yield from _bound_names([*inner, *(one for h in handlers for one in h.body), *other, *final])
