"""Each field of `[megatron]` is honoured, refused, or without effect by a rule of Megatron's own."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from random import Random
from typing import Any

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig

from spare_megatron.config import megatron_fields
from spare_megatron.config.checks.validate import MachineResources, problems, warnings
from spare_megatron.config.megatron_fields import (
    COUNTED_WITH,
    FIXED_IN_MEGATRON,
    HONOURED,
    IGNORED,
    OURS_IN_MEGATRON_WORDS,
    REFUSED,
    field_problems,
    is_off,
)
from spare_megatron.config.model_fields import model_fields
from spare_megatron.config.schema import RunConfig
from spare_megatron.mcore.model.model import layer_spec
from spare_megatron.mcore.model.transformer import FIELDS, transformer_config
from tests.integration import field_effects
from tests.integration.field_effects import CHUNKS, ON_CPUS, ON_GPUS, STAGES, Case, Effects, configured
from tests.integration.mcore_group import CPU, run_group

LISTS: Sequence[Mapping[str, Any]] = (OURS_IN_MEGATRON_WORDS, FIXED_IN_MEGATRON, REFUSED, HONOURED, IGNORED)
MACHINE = MachineResources(num_gpus=8, num_cores=64, has_corpus=True)


DEFAULTS_OF_OTHERS: Mapping[str, Sequence[Any]] = {
    "cuda_graph_scope": ("full", None),
    "cuda_graph_use_single_mempool": (True, False),
    "moe_deepep_num_sms": (20, None),
    "moe_hybridep_num_sms": (16, None),
}
"""Of fields whose default the supported versions do not share, as those of all of them pass."""


def default_of(name: str) -> Any:
    field = FIELDS[name]
    default = field.default_factory() if callable(field.default_factory) else field.default
    return default.name if isinstance(default, Enum) else default


def test_every_field_of_the_installed_version_is_on_one_list() -> None:
    lists = {name: sum(name in one for one in LISTS) for name in FIELDS}
    assert {name: number for name, number in lists.items() if number != 1} == {}
    assert sum(map(len, LISTS)) == len({name for one in LISTS for name in one})


def test_a_field_on_no_list_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {name: row for name, row in HONOURED.items() if name != "softmax_scale"}
    monkeypatch.setattr(megatron_fields, "HONOURED", others)
    (found,) = problems(configured((), {"softmax_scale": 0.5}), MACHINE)
    assert found.startswith(
        "megatron.softmax_scale is not a field of megatron-core's TransformerConfig that is known here;"
    )


def test_a_field_that_the_installed_version_lacks_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_fields, "HONOURED", {**HONOURED, "of_the_next_version": HONOURED["softmax_scale"]})
    config = configured((), {"of_the_next_version": 0.5})
    assert not list(field_problems(config))
    with pytest.raises(ValueError, match=r"megatron\.of_the_next_version is not a field of megatron-core \d"):
        transformer_config(config, CPU)


SET_HERE = {"batch_p2p_sync": False, "moe_token_dispatcher_type": None}
"""Fields whose default is not Megatron's, where they are absent."""


@pytest.mark.parametrize("name", sorted({*REFUSED, *IGNORED, *HONOURED} & FIELDS.keys()))
def test_the_default_of_a_field_is_off(name: str) -> None:
    """Else it would be refused, or a refused one would pass."""
    row = HONOURED.get(name)
    if row is None or row.conditions or row.where:
        assert is_off(name, SET_HERE.get(name, default_of(name)))
        assert not is_off(name, "another value")


@pytest.mark.parametrize("name", sorted(REFUSED.keys() & FIELDS.keys()))
def test_a_refused_field_passes_with_its_default_alone(name: str) -> None:
    default = default_of(name)
    for value in (True, False, 0, 1, 7, 0.5, "x", [1], default):
        is_default = value == default and isinstance(value, bool) is isinstance(default, bool)
        is_default = is_default or (isinstance(value, bool) and value in DEFAULTS_OF_OTHERS.get(name, ()))
        found = list(field_problems(configured((), {name: value})))
        expected = f"megatron.{name}={value} cannot be had: {REFUSED[name]}; remove it"
        # Which is of no such field's type.
        is_none = value is False and default is None and name not in DEFAULTS_OF_OTHERS
        assert found == ([] if is_default or is_none or value is None else [expected])


# ------------------------------------------------------------------------------------------------------- effects


def test_every_honoured_field_has_a_case() -> None:
    assert ON_CPUS.keys() | ON_GPUS.keys() == HONOURED.keys()
    assert not ON_CPUS.keys() & ON_GPUS.keys()
    assert {name for name, row in HONOURED.items() if row.where} <= ON_GPUS.keys()
    for name, case in ON_GPUS.items():
        for value in case.values:
            assert not problems(configured(case.settings, {name: value}, device="gpu"), MACHINE)


FOUND_S = 900.0
"""Longest time to find the effects of all fields, in 150 models after one another: 20 to 130 s."""


@pytest.fixture(scope="module")
def found() -> Mapping[str, tuple[Sequence[Any], Sequence[Effects]]]:
    """For each field on CPUs the values tried, and the effects without it and with each of them."""
    answers = {}
    for beside in ((), STAGES, CHUNKS):
        tried = {
            name: case
            for name, case in ON_CPUS.items()
            if (case.settings if case.settings in (STAGES, CHUNKS) else ()) == beside
        }
        configs = [
            configured(case.settings, {name: value} if value is not None else {})
            for name, case in tried.items()
            for value in (None, *case.values)
        ]
        ranks = run_group(field_effects.effects_of, configured(beside, {}), configs, timeout_s=FOUND_S / 3)
        each = iter(zip(*ranks, strict=True))
        for name, case in tried.items():
            answers[name] = (case.values, [next(each) for _ in (None, *case.values)])
    return answers


@pytest.mark.slow
@pytest.mark.timeout(FOUND_S)
@pytest.mark.parametrize("name", sorted(ON_CPUS))
def test_an_honoured_field_changes_what_is_trained(found: Any, name: str) -> None:
    values, (without, *with_it) = found[name]
    for value, effects in zip(values, with_it, strict=True):
        changed = [kind for kind in without[0] if [one[kind] for one in without] != [one[kind] for one in effects]]
        assert ON_CPUS[name].changes in changed, (value, changed)


@pytest.mark.parametrize("name", sorted(IGNORED.keys() & FIELDS.keys()))
def test_a_field_without_effect_is_warned_of_with_the_rule(name: str) -> None:
    value = {"async_tensor_model_parallel_allreduce": False, "fp8_interval": 2, "moe_extended_tp": True}[name]
    with_it = configured((), {name: value})
    ((without, changed),) = run_group(field_effects.effects_of, with_it, [configured((), {}), with_it])
    assert changed == without
    assert f"megatron.{name}={str(value).lower()} has no effect: {IGNORED[name]}; remove it" in warnings(
        with_it, MACHINE
    )


# --------------------------------------------------------------------------------------------------- drawn tables

BASES = ((), field_effects.ROPE, field_effects.GATED, field_effects.BF16, field_effects.EXPERTS, field_effects.SHARED)
JUNK = (True, False, 0, 1, 2, -1, 0.5, -0.5, float("nan"), float("inf"), "x", "none", "full", [], [1, 0], ["mlp"])


def drawn(random: Random) -> RunConfig:
    """A table of one to three fields, most of them honoured on CPUs, with fitting values or any."""
    names = random.sample([*ON_CPUS] * 6 + [*ON_GPUS, *FIELDS, "no_such_field"], random.randint(1, 3))
    table = {}
    for name in names:
        case = ON_CPUS.get(name) or ON_GPUS.get(name) or Case((), (), "")
        values = case.values if case.values and random.random() < 0.8 else JUNK
        # The loader refuses other types of these.
        table[name] = random.choice([value for value in values if type(value) is COUNTED_WITH.get(name, type(value))])
    return configured(random.choice(BASES), table)


def refusals(config: RunConfig) -> Iterator[str]:
    """Why `spare config check` and the start of a run refuse it."""
    if found := problems(config, MACHINE):
        yield from found
        return
    try:
        layer_spec(config, transformer_config(config, CPU), CPU)
    except ValueError as error:
        yield str(error)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_drawn_tables_are_refused_by_name_or_honoured(seed: int) -> None:
    """Of those that were accepted before there were lists, two fifths had a field that changed nothing."""
    random, accepted = Random(seed), []
    for _ in range(300):
        config = drawn(random)
        if found := list(refusals(config)):
            assert all(any(f"megatron.{name}" in text for name in config.megatron) for text in found), found
            continue
        accepted.append(config)
        built = transformer_config(config, CPU)
        for name, value in config.megatron.items():
            assert name in HONOURED or name in IGNORED or is_off(name, value), config.megatron
            # Megatron writes the first out, and its model takes the second.
            if name not in ("no_rope_freq", "rotary_percent") and not is_off(name, value):
                assert as_written(value_in(built, name)) == value, name
    assert len(accepted) > 15  # fewer where Megatron has more fields that are refused
    assert_each_field_has_an_effect(accepted[:10])


def assert_each_field_has_an_effect(tables: Sequence[RunConfig]) -> None:
    tried = [(config, name, without(config, name)) for config in tables for name in config.megatron]
    tried = [one for one in tried if not is_restated(*one)]
    assert len(tried) > len(tables) / 2
    configs = [config for with_it, _, without_it in tried for config in (with_it, without_it)]
    (effects,) = run_group(field_effects.effects_of, configs[0], configs)
    for (config, name, _), ours, others in zip(tried, effects[::2], effects[1::2], strict=True):
        assert ours != others, (name, config.megatron)


def without(config: RunConfig, name: str) -> RunConfig:
    return replace(config, megatron={key: value for key, value in config.megatron.items() if key != name})


def is_restated(config: RunConfig, name: str, without_it: RunConfig) -> bool:
    """Whether a field has the value that it has anyway, or asks for what is there."""
    is_implied = {
        "add_qkv_bias": bool(model_fields(config)["add_bias_linear"]),  # all linear layers have biases
        "moe_router_dtype": config.model.precision == config.megatron.get("moe_router_dtype"),
    }
    if list(refusals(without_it)) or name in IGNORED or is_implied.get(name):
        return True
    ours, others = (value_in(transformer_config(one, CPU), name) for one in (config, without_it))
    return bool(ours == others)


def value_in(built: TransformerConfig, name: str) -> Any:
    """Without latent attention YaRN has other names, and no field of its own says that it is used."""
    if name == "rope_type":
        return getattr(built, name, "yarn" if hasattr(built, "yarn_beta_fast") else "rope")
    return getattr(built, f"yarn_{name}" if hasattr(built, f"yarn_{name}") else name, None)


def as_written(value: Any) -> Any:
    if callable(value):
        return getattr(value, "__name__", "").strip("_")
    return list(value) if isinstance(value, tuple) else value
