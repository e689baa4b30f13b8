"""Loads a run's configuration from TOML presets and `--set` overrides, records origins of values, and writes it.

Precedence, later wins: schema defaults, included presets in order, the preset itself, the cluster preset, overrides.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import Any

import tomli_w

from spare_megatron.config.batch_size import IN_SAMPLES
from spare_megatron.config.building import advice, build_run_config, flattened, nearest, parsed_value, valid_keys
from spare_megatron.config.megatron_fields import COUNTED_WITH
from spare_megatron.config.model_fields import contradictions, replaced_settings
from spare_megatron.config.object_stores import refusal_of_address
from spare_megatron.config.schema import RunConfig
from spare_megatron.formats.codec import parsed_toml

FOLDER = Path(__file__).parents[1] / "configs"
KINDS = ("run", "model", "cluster")
"""Folders of the presets that ship with the package. No two have the same name, whatever their kind."""

INCLUDE = "include"

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_LEAST_LIKENESS = 0.6
_MOST_SUGGESTED = 4

_SET = "--set "
"""The origin of an override begins so."""

RETIRED: Mapping[str, tuple[object, str]] = {
    "checkpoint.allow_other_corpus": (False, 'checkpoint.allow_changes=["corpus"] allows it'),
    "checkpoint.allow_other_program": (False, 'checkpoint.allow_changes=["program"] allows it'),
    "checkpoint.restart_window_s": (3600.0, "checkpoint.max_restarts limits the restarts of an hour"),
    "spare.placement": ("golomb", "other hosts of shards endure fewer losses; `spare simulate` compares them"),
}
"""Settings of earlier versions, in the configurations of their runs: the only value that is possible now, and why."""


class ConfigError(ValueError):
    """The configuration cannot be read or parsed; the text lists every mistake found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """A configuration, and for each dotted key that was set the file or `--set` argument whose value won."""

    config: RunConfig
    provenance: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    key: str
    value: Any
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mistake:
    """An unknown key or mistyped value; `key` is the setting left at its default, the nearest valid one if unknown."""

    key: str
    text: str

    def concerns(self, problem: str) -> bool:
        key = re.escape(self.key)
        return re.search(rf"(?<![\w.]){key}\b" if "." in self.key else rf"(?<![\w.]){key}[.=]", problem) is not None


def load_run_config(path: Path | None, overrides: Sequence[str] = (), cluster: Path | None = None) -> LoadedConfig:
    """Loads a preset (None: the defaults), the cluster preset, then `a.b=value` overrides; raises ConfigError."""
    loaded, mistakes = _assemble(_read_all(path, overrides, cluster))
    if mistakes:
        raise ConfigError("\n".join(mistake.text for mistake in mistakes))
    return loaded


def load_and_judge(
    path: Path | None,
    overrides: Sequence[str],
    judge: Callable[[RunConfig], Iterable[str]],
    cluster: Path | None = None,
) -> tuple[LoadedConfig, list[str]]:
    """Loads as `load_run_config` does, and returns the configuration with everything wrong with it.

    A mistaken setting keeps its default, and what `judge` reports about it is dropped. ConfigError is raised only if a
    file cannot be read or parsed.
    """
    loaded, mistakes = _assemble(_read_all(path, overrides, cluster))
    try:
        judged = list(judge(loaded.config))
    except ValueError as error:
        judged = [str(error)]
    judged = [text for text in judged if not any(mistake.concerns(text) for mistake in mistakes)]
    return loaded, [*(mistake.text for mistake in mistakes), *judged]


def _assemble(settings: Sequence[_Setting]) -> tuple[LoadedConfig, list[_Mistake]]:
    known = valid_keys()
    mistakes: list[_Mistake] = []
    merged: dict[str, _Setting] = {}
    for setting in settings:
        is_field = setting.key.startswith("megatron.") and setting.key.count(".") == 1
        if setting.key in known or setting.key in RETIRED or is_field:
            merged[setting.key] = setting
        else:
            meant = nearest(setting.key, known) or setting.key
            mistakes.append(_Mistake(key=meant, text=_describe_unknown(setting, known)))
    for key in _superseded(settings, merged):
        del merged[key]
    for setting in [merged.pop(key) for key in RETIRED if key in merged]:
        only, reason = RETIRED[setting.key]
        if setting.value != only:
            what = f"{setting.key}={setting.value} can only be {only} in this version: {reason}; remove it"
            mistakes.append(_Mistake(key=setting.key, text=f"{what} (set by {setting.origin})"))
    config, misfits = build_run_config({key: setting.value for key, setting in merged.items()}, COUNTED_WITH)
    mistakes += [_Mistake(key=item.key, text=f"{item.text} (set by {merged[item.key].origin})") for item in misfits]
    mistakes += [
        _Mistake(key=key, text=f"{text} (set by {merged[key].origin})") for key, text in contradictions(config, merged)
    ]
    origins = {key: setting.origin for key, setting in merged.items()}
    followed = {key: f"{source}, {origins[source]}" for key, source in IN_SAMPLES.items() if source in origins}
    return LoadedConfig(config=config, provenance=followed | origins), mistakes


def _superseded(settings: Sequence[_Setting], merged: Mapping[str, _Setting]) -> set[str]:
    """Settings of the batch in the place of which a later preset, or `--set`, has those in the other unit."""
    sources = {setting.origin: number for number, setting in enumerate(settings)}
    last = len(settings)
    at = {key: last if one.origin.startswith(_SET) else sources[one.origin] for key, one in merged.items()}
    found = {key for key, in_samples in IN_SAMPLES.items() if key in at and at[key] < at.get(in_samples, -1)}
    batch = "spare.microbatches_per_shard"
    return found | {key for key in (IN_SAMPLES[batch],) if key in at and at[key] < at.get(batch, -1)}


def _describe_unknown(setting: _Setting, known: Sequence[str]) -> str:
    if any(key.startswith(f"{setting.key}.") for key in known) or setting.key == "megatron":
        return f"{setting.key}={setting.value!r} must be a table of settings (set by {setting.origin})"
    name = setting.key.rpartition(".")[2]
    hint = f"it is Megatron's: set megatron.{name}" if name in COUNTED_WITH else advice(setting.key, known)
    return f"unknown setting {setting.key} (set by {setting.origin}); {hint}"


# ---------------------------------------------------------------------------------------------------- reading


def _read_all(path: Path | None, overrides: Sequence[str], cluster: Path | None) -> list[_Setting]:
    settings = [item for preset in (path, cluster) if preset for item in _read_preset(_file(preset), included_from=())]
    return [*settings, *(setting for text in overrides for setting in _parse_override(text))]


def _file(given: str | Path, folder: Path = Path(), via: str = "") -> Path:
    if reason := refusal_of_address(str(given)):
        raise ConfigError(f"{given}: {reason}{via}")
    try:
        return preset_file(given, folder)
    except ValueError as error:
        raise ConfigError(f"{error}{via}") from error


def _read_preset(path: Path, included_from: tuple[Path, ...]) -> Iterator[_Setting]:
    path = Path(os.path.normpath(path))
    via = f" (included from {included_from[-1]})" if included_from else ""
    if path in included_from:
        raise ConfigError(f"{path} includes itself through {' -> '.join(map(str, (*included_from, path)))}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        hint = f"; a preset named {path.stem} ships with the package" if path.stem in shipped_presets() else ""
        raise ConfigError(f"cannot read the preset {path}{via}: {reason}{hint}") from error
    try:
        table = parsed_toml(text)
    except ValueError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    includes = table.pop(INCLUDE, [])
    if not isinstance(includes, list) or not all(isinstance(name, str) for name in includes):
        raise ConfigError(
            f"include={includes!r} in {path} must be a list of paths relative to that file, or of names of presets"
        )
    for name in includes:
        yield from _read_preset(_file(name, path.parent, f" (included from {path})"), (*included_from, path))
    yield from (_Setting(key=key, value=value, origin=str(path)) for key, value in flattened(table))


def _parse_override(text: str) -> Iterator[_Setting]:
    """Settings of one `a.b=value` argument."""
    key, separator, value_text = text.partition("=")
    key = key.strip()
    if not separator or not key:
        raise ConfigError(f"--set {text} must have the form section.key=value")
    for full_key, value in flattened({key: parsed_value(value_text.strip())}):
        yield _Setting(key=full_key, value=value, origin=f"{_SET}{text}")


# ---------------------------------------------------------------------------------------------------- presets


def shipped_presets() -> Mapping[str, Path]:
    """Every shipped preset by name, those of runs first."""
    return {file.stem: file for kind in KINDS for file in sorted((FOLDER / kind).glob("*.toml"))}


def preset_file(given: str | Path, folder: Path = Path()) -> Path:
    """The file of a preset that is given as a path relative to `folder`, or as the name of a shipped one.

    An existing file wins over a name. Raises ValueError if a name is none of those that ship.
    """
    path = folder / given
    if not _NAME.fullmatch(str(given)) or (path.exists() and not path.is_dir()):
        return path
    presets = shipped_presets()
    if str(given) not in presets:
        raise ValueError(f"{path} is no file, and no preset is named {given}; {suggestion(str(given))}")
    return presets[str(given)]


def suggestion(name: str) -> str:
    """Names of shipped presets that resemble this one, or where they are listed.

    >>> suggestion("Wipe-Outs")
    'did you mean wipeout_cpu? `spare config list` lists all presets'
    >>> suggestion("mine")
    '`spare config list` lists the presets that ship'
    """
    near = get_close_matches(name.lower().replace("-", "_"), list(shipped_presets()), _MOST_SUGGESTED, _LEAST_LIKENESS)
    if not near:
        return "`spare config list` lists the presets that ship"
    return f"did you mean {', '.join(near)}? `spare config list` lists all presets"


def description(file: Path) -> str:
    """What a preset is: the comment at the top of its file."""
    lines = file.read_text(encoding="utf-8").splitlines()
    end = next((index for index, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return " ".join(line.removeprefix("#").strip() for line in lines[:end])


_EXPORT = re.compile(r"(\bexport\s+[^\s=]+=).*", re.DOTALL)


def write_with_exports(file: Path, text: str, config: RunConfig) -> None:
    """Writes `text`, for its owner alone if `slurm.setup` exports variables, which may be keys to services."""
    is_private = any(_EXPORT.search(line) for line in config.slurm.setup)
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600 if is_private else 0o666)
    with os.fdopen(fd, "w", encoding="utf-8") as stream:
        if is_private:
            os.fchmod(fd, 0o600)  # an existing file keeps its mode otherwise
        stream.write(text)


def without_exports(text: str) -> str:
    """Blanks the exported values in a configuration as TOML.

    >>> without_exports('slurm.setup = ["export KEY=abc"]').split()
    ['[slurm]', 'setup', '=', '[', '"export', 'KEY=...",', ']']
    """
    table = parsed_toml(text)
    lines = table.get("slurm", {}).get("setup", [])
    if not any(_EXPORT.search(line) for line in lines):
        return text
    table["slurm"]["setup"] = [_EXPORT.sub(r"\1...", line) for line in lines]
    return tomli_w.dumps(table)


def dump_run_config(config: RunConfig) -> str:
    """The configuration as TOML with every setting that counts spelled out; loads back to an equal one."""
    table = _plain(config)
    for name in replaced_settings(config):
        table["model"].pop(name, None)  # beside the field in its place it would be a contradiction
    return tomli_w.dumps(table)


def settings(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Every setting by dotted key; of `[megatron]` only the keys that are set."""
    for section in fields(config):
        value = getattr(config, section.name)
        if is_dataclass(value):
            yield from ((f"{section.name}.{item.name}", _plain(getattr(value, item.name))) for item in fields(value))
        elif isinstance(value, Mapping):
            yield from ((f"{section.name}.{key}", _plain(item)) for key, item in value.items())
        else:
            yield section.name, value


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        named = {item.name: getattr(value, item.name) for item in fields(value)}
        return {name: _plain(item) for name, item in named.items() if item is not None}
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value
