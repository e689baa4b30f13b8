"""Megatron's Adam (the fused one where installed) or Muon, and its schedule of rates; all groups have all state."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch
from megatron.core.optimizer import (
    USING_PYTORCH_OPTIMIZER,
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, combine_param_group_overrides
from megatron.core.process_groups_config import ProcessGroupCollection

from spare_megatron.config.model.model_tensors import WORDS, of_all_experts, rule_of, with_local_norms
from spare_megatron.config.schema import ParameterRule, RunConfig
from spare_megatron.core.outer.entries import Revision
from spare_megatron.mcore.gradients.flat_gradients import tied_embedding
from spare_megatron.mcore.model.compatibility import require_muon
from spare_megatron.mcore.model.model import Chunk
from spare_megatron.mcore.optimizer.lane_buffers import LaneBuffers
from spare_megatron.mcore.optimizer.outer_step import OuterState
from spare_megatron.mcore.optimizer.parameters import GradientsForNorm, named_parameters, optimized, whole_for_norm

_MAIN = "fp32_from_fp16_params"
"""Megatron's key of the fp32 parameters of a bf16 model: a list for each group of parameters."""


class Optimizer:
    """Updates all parameters of a rank, once per committed step. With lanes each has all state, and gathers gradients
    by `lanes`.
    """

    def __init__(
        self,
        config: RunConfig,
        chunks: Sequence[Chunk],
        groups: ProcessGroupCollection,
        lanes: LaneBuffers | None = None,
    ) -> None:
        self._chunks, self._groups, self._lanes = chunks, groups, lanes
        self.megatron = build_optimizer(optimizer_config(config), chunks, groups, config.optimizer.rules)
        self._torch_of = {
            parameter: one.optimizer for one in parts_of(self.megatron) for parameter in one.get_parameters()
        }
        self.schedule = make_schedule(config, self.megatron)
        self.outer: OuterState | None = None
        """If the run is one of several sites."""

    def zero_grad(self) -> None:
        self.megatron.zero_grad()

    def gather_gradients(self) -> None:
        """Gathers all gradients of other lanes. Collective over: all lanes."""
        if self._lanes is not None:
            self._lanes.gather_gradients(frozenset(one.parameter for one in named_parameters(self._chunks)))

    def step(self, norm: float | None = None) -> tuple[float, float]:
        """Clips and applies the gradients; returns their norm before, Megatron's unless given, and the rate. Collective
        over: all ranks of the group.
        """
        learning_rate = self.schedule.get_lr({})
        if norm is None:
            was_applied, gradient_norm, _ = self.megatron.step()
        else:
            self.megatron.prepare_grads()
            if self.megatron.config.clip_grad > 0.0:
                clip_grad_by_total_norm_fp32(self.megatron.get_parameters(), self.megatron.config.clip_grad, norm)
            was_applied, gradient_norm = self.megatron.step_with_ready_grads(), norm
        assert was_applied, "only loss scaling, which fp16 alone needs, leaves a step out"
        self.schedule.step(increment=1)
        return float(gradient_norm), float(learning_rate)

    def for_norm(self) -> Iterator[GradientsForNorm]:
        """All that counts for the norm."""
        return whole_for_norm([one.parameter for one in named_parameters(self._chunks)], self._groups)

    def state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Adam's or Muon's state of a parameter; empty before the first update."""
        return dict(self._torch_of[parameter].state.get(parameter, {})) if parameter in self._torch_of else {}

    def first_moments(self) -> Iterator[torch.Tensor]:
        """Adam's first moments and Muon's momentum, parameter by parameter; none before the first update."""
        for named in named_parameters(self._chunks):
            state = self.state_of(optimized(named.parameter))
            yield from (state[key] for key in ("exp_avg", "momentum_buffer") if key in state)

    def forget_moments(self) -> None:
        """Frees what a load is about to replace."""
        for one in parts_of(self.megatron):
            one.optimizer.state.clear()

    def update_counts(self) -> list[float]:
        """Update counts of the schedule and of a fused Adam's parameter groups; torch's are in `state_of`."""
        groups = [group for group in self._counting_groups() if group["params"]]
        return [float(count) for count in (self.schedule.num_steps, *(group.get("step", 0) for group in groups))]

    def _counting_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of a fused Adam."""
        return [] if USING_PYTORCH_OPTIMIZER else [one for one in self.megatron.param_groups if not is_of_muon(one)]

    def part(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        """The state of some chunks: of each parameter, and the schedule's position."""
        kept = [(named.parameter, optimized(named.parameter)) for named in named_parameters(chunks)]
        main = [{} if own is parameter else {"main": own.detach()} for parameter, own in kept]
        states = [{**first, **self.state_of(own)} for first, (_, own) in zip(main, kept, strict=True)]
        outer = {} if self.outer is None else {"outer": self.outer.part(chunks)}
        return {"parameters": states, "schedule": self.schedule.state_dict(), **outer}

    def load_part(self, chunks: Sequence[Chunk], part: dict[str, Any]) -> None:
        """Takes over the state of these chunks of another group, whose tensors are used from here on."""
        for named, state in zip(named_parameters(chunks), part["parameters"], strict=True):
            own = optimized(named.parameter)
            if "main" in state:
                own.detach().copy_(state.pop("main"))
            if state:
                self._torch_of[own].state[own] = state
        if self.outer is not None:
            self.outer.load_part(chunks, part["outer"])
        self._load_schedule(part["schedule"])

    def state_dict(self) -> dict[str, Any]:
        """Moments, fp32 main parameters if any, the schedule's position, and the state of the outer step if any."""
        outer = {} if self.outer is None else {"outer": self.outer.part(self._chunks)}
        return {"megatron": self.megatron.state_dict(), "schedule": self.schedule.state_dict(), **outer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a `state_dict` of torch's or of a fused Adam. All settings stay those of this run."""
        parts = parts_of(self.megatron)
        for number, one in enumerate(parts):
            if one.get_parameters():  # stages without experts have none of these
                own = state["megatron"] if len(parts) == 1 else state["megatron"][number]
                _load_part(one, own, state["schedule"]["num_steps"])
        if self.outer is not None and "outer" not in state:
            self.outer.revision = Revision(0, "")  # the parameters are the first start
        elif self.outer is not None:
            self.outer.load_part(self._chunks, state["outer"])
        self._load_schedule(state["schedule"])

    def _load_schedule(self, schedule: dict[str, Any]) -> None:
        for group in self._counting_groups():
            group["step"] = schedule["num_steps"]
        self.schedule.num_steps = 0  # Megatron adds the steps that it loads to those taken
        self.schedule.load_state_dict(schedule)

    def sharded_state(self, model: dict[str, Any], *, is_loading: bool) -> dict[str, Any]:
        """`state_dict` with each tensor's place in the whole model; `is_loading` allocates missing state."""
        # Names of tensors do not depend on how many optimizers Megatron chains.
        state = self.megatron.sharded_state_dict(model, is_loading, metadata={"chained_optim_avoid_prefix": True})
        if is_loading:
            num_parts = len(parts_of(self.megatron))
            for one in [state] if num_parts == 1 else [state[number] for number in range(num_parts)]:
                del one.get("optimizer", one)["param_groups"]  # a run with other rules has other groups
                if _MAIN in one:  # Megatron leaves out lists that are empty, as a stage may have of some rule
                    one[_MAIN] = {number: dict(enumerate(group)) for number, group in enumerate(one[_MAIN])}
        outer = {} if self.outer is None else {"outer": self.outer.sharded_part(self._chunks, model)}
        return {"megatron": state, "schedule": self.schedule.state_dict(), **outer}


def _load_part(one: MegatronOptimizer, state: dict[str, Any], num_updates: int) -> None:
    """Loads the state of one of the optimizers that Megatron chains, after so many updates."""
    own = one.state_dict()
    whole = state["optimizer"] if "optimizer" in own else state
    whole["param_groups"] = groups = own.get("optimizer", own)["param_groups"]  # those of this run's settings
    if isinstance(main := state.get(_MAIN), dict):
        state[_MAIN] = [[*main.get(number, {}).values()] for number in range(len(groups))]
    of_parameters = [each for key, each in whole["state"].items() if key != "common_step"]
    if not USING_PYTORCH_OPTIMIZER or is_of_muon(groups[0]):
        whole["state"].pop("common_step", None)
        for each in of_parameters:
            each.pop("step", None)
    elif not any("step" in each for each in of_parameters):
        whole["state"].setdefault("common_step", torch.tensor(float(num_updates)))  # Megatron copies it to each
    # Up to 0.16 Megatron takes groups that differ in `min_lr` alone for one, and none needs to be looked for here.
    one._filter_and_reorder_param_groups = lambda _, loaded: loaded
    one.load_state_dict(state)


def is_of_muon(group: dict[str, Any]) -> bool:
    """Whether a parameter group is Muon's, which does not count its updates."""
    return "momentum" in group


def parts_of(optimizer: MegatronOptimizer) -> Sequence[MegatronOptimizer]:
    """The optimizers that Megatron chains: those of Muon and of Adam, each again of experts that lanes divide."""
    parts: Sequence[MegatronOptimizer] = getattr(optimizer, "chained_optimizers", [optimizer])
    return parts


def optimizer_config(config: RunConfig) -> OptimizerConfig:
    """Raises ValueError if the optimizer cannot be had with the packages that are installed."""
    settings = config.optimizer
    is_bf16 = config.model.precision == "bf16"
    of_muon: dict[str, Any] = {}
    if settings.kind == "muon":
        require_muon()
        names = [one.name for one in fields(settings) if one.name.startswith("muon_")]
        of_muon = {name: getattr(settings, name) for name in names}
    return OptimizerConfig(
        optimizer=settings.kind,
        lr=settings.learning_rate,
        min_lr=settings.min_learning_rate,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.eps,
        clip_grad=settings.clip_grad,
        bf16=is_bf16,
        params_dtype=torch.bfloat16 if is_bf16 else torch.float32,
        **of_muon,
    )


def build_optimizer(
    config: OptimizerConfig, chunks: Sequence[Chunk], groups: ProcessGroupCollection, rules: Sequence[ParameterRule]
) -> MegatronOptimizer:
    """Megatron's optimizer with the rates of `overrides`. Collective over: all ranks of the group."""
    return get_megatron_optimizer(
        config,
        [chunk.module for chunk in chunks],
        config_overrides=overrides(config, chunks, rules),
        use_gloo_process_groups=False,
        pg_collection=groups,
    )


def make_schedule(config: RunConfig, optimizer: MegatronOptimizer | torch.optim.Optimizer) -> OptimizerParamScheduler:
    """The schedule of learning rate and weight decay; it writes both into the optimizer's parameter groups."""
    settings = config.optimizer
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.learning_rate,
        min_lr=settings.min_learning_rate,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=settings.decay_steps or config.train.steps,
        lr_decay_style=_DECAY_IN_MEGATRON.get(settings.decay_style, settings.decay_style),
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=config.train.steps,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
        wsd_decay_steps=settings.wsd_decay_steps,
        lr_wsd_decay_style=settings.wsd_decay_style,
    )


_DECAY_IN_MEGATRON = {"inverse_square_root": "inverse-square-root", "wsd": "WSD"}


# ------------------------------------------------------------------------------------------------- rates by parameter


def overrides(
    config: OptimizerConfig, chunks: Sequence[Chunk], rules: Sequence[ParameterRule]
) -> dict[ParamKey, dict[str, Any]]:
    """For `get_megatron_optimizer`: Megatron's own, no weight decay on biases and vectors, changed by the rules."""
    standard: dict[ParamKey, dict[str, Any]] = get_standard_config_overrides(config)
    if not rules:
        return standard
    having: dict[tuple[tuple[str, float], ...], set[torch.nn.Parameter]] = {}
    for name, parameter in names_for_rules(chunks):
        rates = combine_param_group_overrides([one for key, one in standard.items() if key.matches(parameter, name)])
        rates |= _rates(config, rule_of(name, rules))
        if rates.get("wd_mult") == 1.0:
            del rates["wd_mult"]  # Megatron confuses groups that differ in nothing when it loads a checkpoint
        having.setdefault(tuple(sorted(rates.items())), set()).add(parameter)
    # Disjoint, since Megatron refuses overrides that differ and meet at one parameter.
    return {
        ParamKey(predicate=ParamPredicate(name=repr(rates), fn=lambda one, those=those: one in those)): dict(rates)
        for rates, those in having.items()
        if rates
    }


def _rates(config: OptimizerConfig, rule: ParameterRule | None) -> dict[str, float]:
    rates: dict[str, float] = {}
    if rule is not None and rule.weight_decay_factor is not None:
        rates["wd_mult"] = rule.weight_decay_factor
    if rule is not None and rule.learning_rate_factor != 1.0:
        # Megatron's schedule reads the limits alone, and loading a checkpoint the factor alone.
        factor, lowest = rule.learning_rate_factor, rule.min_learning_rate_factor
        lowest = factor if lowest is None else lowest
        rates |= {"lr_mult": factor, "max_lr": config.lr * factor, "min_lr": config.min_lr * lowest}
    return rates


def names_for_rules(chunks: Sequence[Chunk]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters of this rank by the names of `parameter_names`: both copies of a tied table have one."""
    for chunk in chunks:
        tied = tied_embedding(chunk)
        for named in named_parameters([chunk]):
            name = WORDS if named.parameter is tied else of_all_experts(named.name)
            yield with_local_norms(name), named.parameter
