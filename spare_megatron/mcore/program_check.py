"""Checks a program before any rank starts: its samples and, by forward passes without values, its use of `[data]`'s
masks.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spare_megatron.config.megatron_fields import ON_GPUS_ALONE
from spare_megatron.config.schema import LayoutConfig, RunConfig
from spare_megatron.mcore.model import cpu
from spare_megatron.mcore.model.batches import UnreadMask, masks_to_read, on_device
from spare_megatron.mcore.model.model import ModelContext, checked
from spare_megatron.mcore.model.process_groups import build_process_groups
from spare_megatron.mcore.model.program import LOSS, Program, StepContext
from spare_megatron.mcore.model.training_samples import Corpus
from spare_megatron.mcore.model.transformer import transformer_config
from spare_megatron.stacking.layout import Slabs

_CPU = torch.device("cpu")
_MOST_NUMBERS = 10_000
"""Numbers that a program may take out of tensors, so that no loop over their values is endless."""


def check_program(config: RunConfig, program: Program) -> None:
    """Raises BadSample for the samples of a program, and UnreadMask if its loss does not depend on a mask. A program
    that fails on tensors without values passes. The world is this process alone, made if absent.
    """
    corpus = program.corpus(config)
    corpus.digest()
    if not config.data.mask_settings or program.own <= {"datasets_provider"}:
        return
    try:
        trial = _Trial(config, program, corpus)
        with (
            FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True) as fake,
            torch.no_grad(),
        ):
            trial.follow_masks(fake)
            trial.follow_in_stages(fake)
    except UnreadMask:
        raise
    except Exception:  # noqa: BLE001  (it needs values, or devices that are not here)
        return


class _Trial:
    """Forward passes of a program in groups of one rank on a CPU, with the stages of the run one by one."""

    def __init__(self, config: RunConfig, program: Program, corpus: Corpus) -> None:
        layout = config.layout
        self._num_stages = layout.pipeline_parallel * layout.virtual_pipeline
        self._program, self._corpus = program, corpus
        self._config = replace(
            config,
            layout=LayoutConfig(num_groups=layout.num_groups),
            model=replace(config.model, transformer_impl="local", attention_dropout=0.0, hidden_dropout=0.0),
            megatron={key: value for key, value in config.megatron.items() if key not in ON_GPUS_ALONE},
        )
        cpu.install()
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        timeout = timedelta(seconds=config.control.group_timeout_s)
        self._groups = build_process_groups(self._config.parallel, _CPU, timeout)
        self._transformer = transformer_config(self._config, _CPU)
        self._batch = on_device(corpus.microbatch(0, 0), self._config, _CPU, self._groups.cp)

    def follow_masks(self, fake: FakeTensorMode) -> None:
        """Raises UnreadMask if the loss does not depend on a mask in the first or last step, or in an evaluation."""
        model, config = self._model(0, 1), self._config
        for step, is_training in product({0, config.train.steps - 1}, {True, not config.eval.every_steps}):
            self._follow(fake, model.train(is_training), self._context(step, 0, 1))

    def follow_in_stages(self, fake: FakeTensorMode) -> None:
        """Raises UnreadMask if the first, a middle or the last chunk of a pipeline does not read or use a mask."""
        size, last = self._config.train.micro_batch_size, self._num_stages - 1
        for stage in sorted({0, last // 2, last}) if last else ():
            model = self._model(stage, self._num_stages)
            if stage:
                shape = self._config.model.seq_length, size, self._config.model.hidden_size
                model.set_input_tensor(torch.zeros(shape, dtype=self._transformer.params_dtype))
            self._follow(fake, model, self._context(0, stage, self._num_stages))

    def _follow(self, fake: FakeTensorMode, model: MegatronModule, context: StepContext) -> None:
        batch, pre, post = self._without_values(fake), context.pre_process, context.post_process
        masks = masks_to_read(self._config.data, pre_process=pre, post_process=post)
        with _Flow({key: batch[key] for key in masks}) as flow:
            output, terms = self._program.forward(batch, model, context)
        if not (pre and post) and "model_provider" in self._program.own:
            return  # a chunk of its own may have no attention
        used = flow.used_by(terms[LOSS][0] if post else output)
        if unused := {key: setting for key, setting in masks.items() if key not in used}:
            roles = self._program.own & {"forward_step", "model_provider"}
            raise UnreadMask(" or ".join(sorted(roles)), "use", unused)

    def _without_values(self, fake: FakeTensorMode) -> dict[str, Tensor]:
        return {key: fake.from_tensor(tensor) for key, tensor in self._batch.items()}

    def _model(self, stage: int, num_stages: int) -> MegatronModule:
        place = ModelContext(
            config=self._config,
            transformer=self._transformer,
            groups=self._groups,
            device=_CPU,
            stage=stage,
            num_stages=num_stages,
            layers=Slabs(self._config.model.num_layers, (num_stages,)).layers[stage],
            virtual_stage=None,
        )
        return checked(self._program.model_provider(place), place)

    def _context(self, step: int, stage: int, num_stages: int) -> StepContext:
        return StepContext(
            config=self._config,
            groups=self._groups,
            device=_CPU,
            step=step,
            first_sequence=self._corpus.first_sample(step, 0),
            pre_process=stage == 0,
            post_process=stage == num_stages - 1,
        )


class _Flow(TorchDispatchMode):
    """Follows tensors: what is computed from their values, or written into, depends on them. A number that the program
    takes out of a tensor is 1, and its masks count as used from then on.
    """

    def __init__(self, sources: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._reached: dict[int, tuple[Tensor, frozenset[str]]] = {}
        """By storage: a tensor that keeps it from being freed and its number from being used again, and its sources."""
        self._looked_at: frozenset[str] = frozenset()
        self._num_numbers = 0
        for key, tensor in sources.items():
            self._add([tensor], frozenset({key}))

    def used_by(self, result: Tensor) -> frozenset[str]:
        return self._sources([result]) | self._looked_at

    def _sources(self, values: Iterable[object]) -> frozenset[str]:
        storages = (one.untyped_storage()._cdata for one in values if isinstance(one, Tensor))
        return frozenset().union(*(self._reached[one][1] for one in storages if one in self._reached))

    def _add(self, values: Iterable[object], sources: frozenset[str]) -> None:
        for one in values:
            if isinstance(one, Tensor):
                self._reached[one.untyped_storage()._cdata] = one, sources | self._sources([one])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_leaves((args, kwargs))
        name = func.overloadpacket.__name__
        sources = frozenset() if name.endswith("_like") or name.startswith("new_") else self._sources(given)
        if name == "_local_scalar_dense":
            self._looked_at |= sources
            self._num_numbers += 1
            if self._num_numbers > _MOST_NUMBERS:
                raise RuntimeError("the program takes too many numbers out of tensors")
            return {torch.bool: True}.get(dtype := args[0].dtype, 1.0 if dtype.is_floating_point else 1)
        result = func(*args, **(kwargs or {}))
        if sources:
            self._add([*tree_leaves(result), *(given if func._schema.is_mutable else ())], sources)
        return result
