"""Checks a program before any rank starts: its samples, and that its loss depends on the masks of `[data]`.

A forward pass without memory or values shows what depends on what, whatever the size of the model.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spare_megatron.config.megatron_fields import ON_GPUS_ALONE
from spare_megatron.config.schema import LayoutConfig, RunConfig
from spare_megatron.mcore.model import cpu
from spare_megatron.mcore.model.batches import UnreadMask, masks_to_read
from spare_megatron.mcore.model.model import ModelContext, checked
from spare_megatron.mcore.model.process_groups import build_process_groups
from spare_megatron.mcore.model.program import LOSS, Program, StepContext
from spare_megatron.mcore.model.training_samples import Corpus, on_device
from spare_megatron.mcore.model.transformer import transformer_config

_CPU = torch.device("cpu")


def check_program(config: RunConfig, program: Program) -> None:
    """Raises BadSample for the samples of a program, and UnreadMask if its loss does not depend on a mask.

    A program that looks at values cannot be followed and passes: its ranks see what it reads of each microbatch. The
    world has to be this process alone, and is made if there is none.
    """
    corpus = program.corpus(config)
    corpus.digest()
    if not config.data.document_settings or program.own <= {"datasets_provider"}:
        return
    try:
        trial = _Trial(config, program, corpus)
        with FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.no_grad():
            trial.follow_masks(fake)
            trial.read_in_stages(fake)
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
        masks = masks_to_read(config.data, pre_process=True, post_process=True)
        for step, is_training in product({0, config.train.steps - 1}, {True, not config.eval.every_steps}):
            batch = self._without_values(fake)
            with ExitStack() as following:
                flows = {key: following.enter_context(_Flow(batch[key])) for key in masks}
                _, terms = self._program.forward(batch, model.train(is_training), self._context(step, 0, 1))
            if unused := {key: masks[key] for key, flow in flows.items() if not flow.reaches(terms[LOSS])}:
                roles = self._program.own & {"forward_step", "model_provider"}
                raise UnreadMask(" or ".join(sorted(roles)), "use", unused)

    def read_in_stages(self, fake: FakeTensorMode) -> None:
        """Raises UnreadMask if the first, a middle or the last chunk of a pipeline does not read a mask."""
        size, last = self._config.train.micro_batch_size, self._num_stages - 1
        for stage in sorted({0, last // 2, last}) if last else ():
            model = self._model(stage, self._num_stages)
            if stage:
                shape = self._config.model.seq_length, size, self._config.model.hidden_size
                model.set_input_tensor(torch.zeros(shape, dtype=self._transformer.params_dtype))
            self._program.forward(self._without_values(fake), model, self._context(0, stage, self._num_stages))

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
    """Follows a tensor: what is computed from it, or written into, depends on it."""

    def __init__(self, source: Tensor) -> None:
        super().__init__()
        self._reached: dict[int, Tensor] = {}
        """By storage, each with a tensor that keeps it from being freed and its number from being used again."""
        self._add([source])

    def reaches(self, values: Iterable[object]) -> bool:
        return any(isinstance(one, Tensor) and one.untyped_storage()._cdata in self._reached for one in values)

    def _add(self, values: Iterable[object]) -> None:
        self._reached |= {one.untyped_storage()._cdata: one for one in values if isinstance(one, Tensor)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = tree_leaves((args, kwargs))
        if self.reaches(given):
            self._add(tree_leaves(result))
            self._add(given if func._schema.is_mutable else ())
        return result
