"""Loads scenarios from presets and TOML files, and holds the published results of SPARe (arXiv 2603.00357)."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from importlib.resources import files
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from spare_megatron.config.building import advice, convert, flattened, leaf_kinds, parsed_value
from spare_megatron.formats.codec import parsed_toml
from spare_megatron.tools.simulate.failures import LossCause, MachineDomain
from spare_megatron.tools.simulate.scenario import Scenario
from spare_megatron.tools.simulate.traces import read_trace


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPoint:
    """The best published result of "replication" or "spare", at stack granularity, for one number of groups."""

    policy: str
    num_groups: int
    redundancy: int
    time_to_train_ratio: float
    availability: float


PUBLISHED = tuple(
    PublishedPoint(policy=policy, num_groups=n, redundancy=r, time_to_train_ratio=ratio, availability=up)
    for policy, n, r, ratio, up in (
        ("replication", 200, 3, 6.07, 0.6174),
        ("replication", 600, 3, 4.27, 0.7989),
        ("replication", 1000, 3, 3.88, 0.8441),
        ("spare", 200, 9, 2.92, 0.8700),
        ("spare", 600, 8, 2.49, 0.9390),
        ("spare", 1000, 9, 2.34, 0.9654),
    )
)
"""600,000 H100, a loss every 5 min, shards of 64 s, saves of 60 s, restarts of 60 min, 10,000 steps."""


def published(scenario_name: str) -> tuple[PublishedPoint, ...]:
    """The paper's points for one of its scenarios; none for other scenarios.

    >>> [point.time_to_train_ratio for point in published("paper_n600")]
    [4.27, 2.49]
    """
    return tuple(point for point in PUBLISHED if scenario_name == f"paper_n{point.num_groups}")


T = TypeVar("T")
TRACE_FILE = "failures.trace_file"
"""Key of a trace (`traces.read_trace`), relative to the TOML file that names it."""
REFORM_COSTS = {"costs.detect_s": 2.0, "costs.rebuild_s": 2.0}
"""What a scenario with re-forming charges unless it says otherwise: its gain must not come from what it leaves out."""
NAMED = {"failures.mix": LossCause, "failures.domains": MachineDomain}
"""What has names in its keys, as in failures.mix.NAME.repair_s."""
_FORMER_KEYS = {"slice_redundancy": "partition_redundancy", "partition_copy_s": "partition_copy_s"}


class ScenarioError(ValueError):
    """A scenario cannot be read or is invalid."""


def preset_names() -> tuple[str, ...]:
    folder = files("spare_megatron.tools.simulate") / "presets"
    return tuple(sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml")))


def load_scenario(name_or_path: str | Path, overrides: Mapping[str, Any] | Sequence[str] = ()) -> Scenario:
    """Loads the scenario of a preset, by its name, or of a TOML file, by a path that ends in .toml. `overrides`: values
    by dotted key, or arguments `a.b=value` with the value in TOML or a bare string. ScenarioError: there is no such
    preset or file, it cannot be parsed, a key is unknown, or a value is invalid.
    """
    text, folder = _read(name_or_path)
    try:
        values = dict(flattened(parsed_toml(text)))
    except ValueError as error:
        raise ScenarioError(f"{name_or_path} is not valid TOML: {error}") from error
    values.setdefault("name", Path(name_or_path).name.removesuffix(".toml"))
    values |= dict(overrides) if isinstance(overrides, Mapping) else dict(map(_parse_override, overrides))
    values = {_FORMER_KEYS.get(key, key): value for key, value in values.items()}
    _check_keys(values)
    if values.get("reform_s") not in (None, "none"):
        values = REFORM_COSTS | values
    try:
        for prefix, kind in NAMED.items():
            values[prefix] = _take_named(values, prefix, kind)
        if values.get(TRACE_FILE):
            values["failures.trace"] = read_trace(folder / str(values.pop(TRACE_FILE)))
        return _build(Scenario, values, "")
    except ScenarioError:
        raise
    except ValueError as error:
        raise ScenarioError(f"{name_or_path}: {error}") from error


def _read(name_or_path: str | Path) -> tuple[str, Path]:
    """The text, and the folder that paths in it are relative to."""
    path = Path(name_or_path)
    if path.suffix == ".toml":
        try:
            return path.read_text(encoding="utf-8"), path.parent
        except OSError as error:
            raise ScenarioError(f"cannot read the scenario {path}: {error.strerror}") from error
    if str(name_or_path) not in preset_names():
        known = ", ".join(preset_names())
        raise ScenarioError(f"there is no preset {name_or_path}; known: {known}; a file has to end in .toml")
    preset = files("spare_megatron.tools.simulate") / "presets" / f"{name_or_path}.toml"
    return preset.read_text(encoding="utf-8"), Path.cwd()


def _check_keys(values: Mapping[str, Any]) -> None:
    known = [key for key in leaf_kinds(Scenario, "") if key not in (*NAMED, "failures.trace")] + [TRACE_FILE]
    for prefix, kind in NAMED.items():
        names = {key.rpartition(".")[0] for key in values if key.startswith(f"{prefix}.")}
        known += [f"{name}.{field.name}" for name in names for field in fields(kind) if field.name != "name"]
    for key in values:
        if key not in known:
            raise ScenarioError(f"unknown setting {key}; {advice(key, known)}")


def _take_named(values: dict[str, Any], prefix: str, kind: type[T]) -> tuple[T, ...]:
    """Removes the keys of causes or domains from `values`; returns these in the order in which they are first named."""
    keys = [key for key in values if key.startswith(f"{prefix}.")]
    found = {key: values.pop(key) for key in keys}
    names = dict.fromkeys(key.rpartition(".")[0] for key in keys)
    return tuple(_build(kind, found | {f"{name}.name": name[len(prefix) + 1 :]}, f"{name}.") for name in names)


def _parse_override(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise ScenarioError(f"{text} must have the form key=value")
    return key.strip(), parsed_value(value.strip())


def _build(kind: type[T], values: Mapping[str, Any], prefix: str) -> T:
    hints = get_type_hints(kind)
    found: dict[str, Any] = {}
    for field in fields(kind):  # type: ignore[arg-type]
        key, hint = f"{prefix}{field.name}", hints[field.name]
        if is_dataclass(hint) and isinstance(hint, type):
            found[field.name] = _build(hint, values, f"{key}.")
        elif key in values:
            found[field.name] = _converted(values[key], hint, key)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ScenarioError(f"the scenario has to set {key}")
    return kind(**found)


def _converted(value: Any, kind: Any, key: str) -> Any:
    """As for the settings of runs; also "none" for None, and causes and losses as they are."""
    if value in (None, "none") and NoneType in get_args(kind):
        return None
    return value if isinstance(value, tuple) else convert(value, kind, key)
