"""A data-parallel group of processes for tests of `mcore`, and what its ranks are asked to do.

Tasks run in the ranks: they take the configuration first and return something that can be pickled.
"""

import hashlib
import math
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

from spare_megatron.config.schema import RunConfig
from spare_megatron.core.log.loss_sums import LossSum
from spare_megatron.faults.points import FaultPoint
from spare_megatron.mcore.gradients.flat_gradients import flat_parameters, parts_of
from spare_megatron.mcore.gradients.gradients import FloatSums, Totals
from spare_megatron.mcore.model import cpu
from spare_megatron.mcore.model.attention import TorchCoreAttention
from spare_megatron.mcore.model.batches import on_device
from spare_megatron.mcore.model.process_groups import build_process_groups
from spare_megatron.mcore.model.rng import distinct_on_tensor_ranks
from spare_megatron.mcore.model.training_samples import Corpus
from spare_megatron.mcore.model.transformer import transformer_config
from spare_megatron.mcore.trainer import GroupTrainer, IncompleteSum, UpdateResult
from spare_megatron.stacking.layout import ShardId
from spare_megatron.stacking.plans import Microbatch
from tests.integration.recording_probe import RecordingProbe
from tests.search_path import put_checkout_first

CPU = torch.device("cpu")
TIMEOUT_S = 100.0
Arrays = dict[str, np.ndarray]


def work_of(*addresses: tuple[int, int]) -> list[Microbatch]:
    return [Microbatch(ShardId(shard), index) for shard, index in addresses]


def all_work(config: RunConfig, step: int = 0) -> list[Microbatch]:
    indices = range(config.spare.ramp.at(step))
    return work_of(*((shard, index) for shard in range(config.layout.num_groups) for index in indices))


def numbers_of(config: RunConfig, work: Sequence[Microbatch], step: int = 0) -> list[int]:
    """The numbers of microbatches in the batch of a step."""
    return [shard * config.spare.ramp.at(step) + index for shard, index in work]


# ------------------------------------------------------------------------------------------ starting the processes


def run_group(task: Callable[..., Any], config: RunConfig, *arguments: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
    """What the task returned on each rank of a group, in the order of the ranks."""
    return run_ranks(config.parallel.ranks_per_group, task, config, *arguments, timeout_s=timeout_s)


def run_ranks(
    num_ranks: int, task: Callable[..., Any], config: RunConfig, *arguments: Any, timeout_s: float = TIMEOUT_S
) -> list[Any]:
    """The same for a world of any size."""
    context = multiprocessing.get_context("forkserver")
    # Paid once for all tests: a child starts with torch and megatron imported.
    context.set_forkserver_preload(["spare_megatron.mcore.trainer", __name__])
    os.environ["OMP_NUM_THREADS"] = "1"
    put_checkout_first()
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
        processes = [
            context.Process(target=_run_rank, args=((rank, num_ranks), store, sender, task, config, arguments))
            for rank, (_, sender) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        try:
            return _answers([receiver for receiver, _ in pipes], timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _answers(receivers: Sequence[Connection], timeout_s: float) -> list[Any]:
    end_s = time.monotonic() + timeout_s
    answers = []
    for rank, receiver in enumerate(receivers):
        if not receiver.poll(max(0.0, end_s - time.monotonic())):
            raise TimeoutError(f"rank {rank} did not answer within {timeout_s} s")
        answer, error = receiver.recv()
        if error:
            raise RuntimeError(f"rank {rank} failed:\n{error}")
        answers.append(answer)
    return answers


def _run_rank(
    place: tuple[int, int],
    store: str,
    sender: Connection,
    task: Callable[..., Any],
    config: RunConfig,
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    rank, num_ranks = place
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, num_ranks),
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=TIMEOUT_S / 2),
        )
        sender.send((task(config, *arguments), None))
        # A rank that left would break the sockets of one that still computes.
        dist.barrier()
    except Exception:  # noqa: BLE001  (the parent shall see it, whatever it is)
        sender.send((None, traceback.format_exc()))


# ------------------------------------------------------------------------------------------------------------ tasks


def compute_sums(config: RunConfig, *calls: Sequence[Microbatch]) -> tuple[Totals, dict[str, Any]]:
    """Unscaled local sums of step 0 after some calls of compute: totals, and of each parameter value and gradient."""
    return sums_of(GroupTrainer(config, CPU), calls)


def sums_of(trainer: GroupTrainer, calls: Sequence[Sequence[Microbatch]]) -> tuple[Totals, dict[str, Any]]:
    """The same of this trainer."""
    trainer.begin_step(0)
    for work in calls:
        trainer.compute(work)
    totals = reduce_alone(trainer)
    for slab in trainer.slabs:
        slab.gradients.finish()
    fill_from_lanes(trainer)
    finalize_model_grads([chunk.module for chunk in trainer.chunks], None, pg_collection=trainer.process_groups)
    return totals, {
        named.name: (named.parameter.detach().float().numpy(), named.main_grad.numpy(), named.partition_dim)
        for named in trainer.parameters_named()
    }


def microbatch_losses(config: RunConfig, *calls: Sequence[Microbatch]) -> tuple[float, list[dict[int, float]]]:
    """The loss of step 0 over all calls of compute, and after each call the mean losses by number that it has added."""
    trainer = GroupTrainer(config, CPU)
    trainer.begin_step(0)
    found = []
    for work in calls:
        trainer.compute(work)
        found.append({one.number: loss for one, loss in trainer.microbatch_losses().items()})
    return reduce_alone(trainer).loss.total, found


def fill_from_lanes(trainer: GroupTrainer) -> None:
    """Makes the gradients of each lane whole."""
    spaces = [slab.gradients.space for slab in trainer.slabs]
    for space, scatter, lanes in ((one, *pair) for one in spaces for pair in zip(one.ranges, one.lanes, strict=True)):
        parts = list(parts_of(space.segments, range(scatter.start, scatter.stop)))
        own = torch.cat([part.gradients for part in parts])[scatter.own.start - scatter.start :][: len(scatter.own)]
        strips = [torch.empty(0)] * lanes.size()
        dist.all_gather_object(strips, own, group=lanes)
        for part in parts:
            part.gradients.copy_(torch.cat(strips)[part.start - scatter.start : part.stop - scatter.start])


def packed_sums(config: RunConfig, step: int, *orders: Sequence[Sequence[Microbatch]]) -> list[np.ndarray]:
    """All staged buckets of one step for each way to compute it, a way being the works of its calls."""
    return [packed.numpy() for packed, _ in _sums_of(config, step, orders)]


def _sums_of(
    config: RunConfig, step: int, orders: Sequence[Sequence[Sequence[Microbatch]]]
) -> Iterator[tuple[torch.Tensor, GroupTrainer]]:
    trainer = GroupTrainer(config, CPU)
    for calls in orders:
        trainer.begin_step(step)
        for work in calls:
            trainer.compute(work)
        packed = staged(trainer)
        assert trainer.slabs[0].gradients.wrong_numbers() == ""
        yield packed, trainer


def staged(trainer: GroupTrainer, slab: int = 0) -> torch.Tensor:
    """The local gradient sums of a slab as they are staged, then the extras; those of the last bucket are those of all.

    These are the tokens that count, where they are counted, how many groups' sums are unsound, their count and loss.
    Checksums are left out: one number has many, which differ by how it was added up.
    """
    sums = trainer.slabs[slab].gradients
    parts = [sums.stage(bucket, sums.new_staging()) for bucket in range(len(sums.buckets))]
    assert {int(part[-2]) for part in parts} == {int(parts[-1][-2])}
    assert not any(part[-1] for part in parts[:-1])
    gradients = [part[: len(elements)] for part, elements in zip(parts, sums.buckets, strict=True)]
    return torch.cat([*gradients, sums._beside_gradients(parts[-1])])  # type: ignore[attr-defined]


def placed_sums(config: RunConfig, step: int, *orders: Sequence[Sequence[Microbatch]]) -> list[np.ndarray]:
    """As `packed_sums`, with gradients at their places in the flat space and zeros outside of own strips."""
    buffers = []
    for packed, trainer in _sums_of(config, step, orders):
        space = trainer.slabs[0].gradients.space
        own = torch.tensor([element for one in space.ranges for element in one.own])
        extras = packed[len(own) :]
        whole = torch.zeros(space.ranges[-1].stop + len(extras), dtype=packed.dtype)
        whole[own], whole[-len(extras) :] = packed[: len(own)], extras
        buffers.append(whole.numpy())
    return buffers


def norms_after_a_nan_on_the_last_lane(config: RunConfig, work: Sequence[Microbatch]) -> list[float]:
    """Of every bucket. The NaN is in the first strip, the gradient that follows wherever it belongs."""
    trainer = GroupTrainer(config, CPU)
    sums, lanes = trainer.slabs[0].gradients, trainer.process_groups.lanes
    trainer.begin_step(0)
    if lanes.rank() == lanes.size() - 1:
        sums.poison()
        sums.space.segments[0].gradients[0] = math.nan
    trainer.compute(work)
    return [float(sums.norm(bucket)) for bucket in range(len(sums.buckets))]


def kept_sums(
    config: RunConfig, kept_on: Sequence[int], before: Sequence[Microbatch], after: Sequence[Microbatch]
) -> tuple[list[range], np.ndarray, np.ndarray, np.ndarray]:
    """Buckets, and what they stage: after some work; after more, with the first of three times their sums kept; after
    all of it without keeping any. `kept_on` has how many each lane keeps."""
    trainer = GroupTrainer(config, CPU)
    sums, num_kept = trainer.slabs[0].gradients, kept_on[trainer.process_groups.lanes.rank()]
    trainer.begin_step(0)
    trainer.compute(before)
    first = staged(trainer).numpy()
    for bucket in range(num_kept):
        staging = sums.new_staging()
        sums.stage(bucket, staging).mul_(3)
        sums.put(bucket, staging)
    sums.mark_kept(num_kept, min(kept_on))
    trainer.compute(after)
    kept = staged(trainer).numpy()
    assert not bool(sums._is_wrong[:, num_kept:].any()), "of what is not kept"
    trainer.begin_step(0)
    trainer.compute(before)
    trainer.compute(after)
    all_of_it = staged(trainer).numpy()
    assert sums.wrong_numbers() == ""
    return list(sums.buckets), first, kept, all_of_it


def with_and_without_megatron(
    config: RunConfig, *calls: Sequence[Microbatch]
) -> list[tuple[bool, np.ndarray, UpdateResult, str]]:
    """A step as it is, and one in which Megatron adds each gradient to its buffers, too, as it does by itself: whether
    it has, the staged sums, what the update returned, and the parameters after it.
    """
    found = []
    for may_add in (False, True):
        trainer = GroupTrainer(config, CPU)
        trainer.begin_step(0)
        for one in flat_parameters(trainer.chunks) if may_add else ():
            one.parameter.grad_added_to_main_grad = False
        for work in calls:
            trainer.compute(work)
        was_added = any(bool(named.main_grad.any()) for named in trainer.parameters_named())
        sums = staged(trainer)
        put_all(trainer, sums)
        found.append((was_added, sums.numpy(), trainer.update(agreed_loss(trainer)), trainer.params_sha256()))
    return found


def summed_in_bf16(config: RunConfig, num_counted: int) -> tuple[np.ndarray, np.ndarray, Totals, float]:
    """Local sums of step 0, the same after they were staged, tripled and put back, the totals, and the local loss.

    `num_counted` microbatches are counted beside those that are computed.
    """
    trainer = GroupTrainer(config, CPU)
    sums = trainer.slabs[0].gradients
    trainer.begin_step(0)
    trainer.compute(all_work(config))
    sums.add_count(num_counted)
    before = torch.cat(list(sums.local_sums()))
    loss = float(sums.extras(sums.stage(len(sums.buckets) - 1, sums.new_staging()))[-1])
    for bucket, elements in enumerate(sums.buckets):
        staging = sums.new_staging()
        staged = sums.stage(bucket, staging)
        assert staged.dtype is torch.bfloat16
        staged[: len(elements)] *= 3
        sums.extras(staged).mul_(3)
        sums.on_summed(bucket, staging)
        sums.put(bucket, staging)
    sums.mark_kept(0)
    return before.numpy(), torch.cat(list(sums.local_sums())).numpy(), sums.totals(), loss


def left_early(config: RunConfig, *calls: Sequence[Microbatch]) -> tuple[list[int], int, bool]:
    """Ready buckets that the trainer reports during the last of some calls, how many there are, and whether each
    had its last bit when it was reported ready."""
    trainer = GroupTrainer(config, CPU)
    sums = trainer.slabs[0].gradients
    reported: list[int] = []
    parts: list[torch.Tensor] = []

    def report(position: int, num_ready: int) -> None:
        assert position == dist.get_rank()
        reported.append(num_ready)
        parts.extend(sums.stage(bucket, sums.new_staging()).clone() for bucket in range(len(parts), num_ready))

    trainer.begin_step(0)
    for work in calls[:-1]:
        trainer.compute(work)
    trainer.compute(calls[-1], report)
    final = [sums.stage(bucket, sums.new_staging()) for bucket in range(len(sums.buckets))]
    return reported, len(final), all(map(torch.equal, parts, final))


def put_all(trainer: GroupTrainer, total: torch.Tensor, slab: int = 0) -> Totals:
    """Puts a sum over groups of what `staged` gives."""
    sums = trainer.slabs[slab].gradients
    *gradients, of_all = total.split([*map(len, sums.buckets), len(total) - sum(map(len, sums.buckets))])
    for bucket, of_bucket in enumerate(gradients):
        extras = of_all.clone()
        if bucket < len(sums.buckets) - 1:
            extras[-1] = 0
            extras[:-3] = 0
        staging = torch.cat([of_bucket, extras.new_zeros(sums._num_digits), extras])  # type: ignore[attr-defined]
        sums.on_summed(bucket, staging)
        sums.put(bucket, staging)
    return sums.totals()


def reduce_alone(trainer: GroupTrainer) -> Totals:
    """Puts the local sums as if they were the sums over all groups; returns the totals of the last slab."""
    return [put_all(trainer, staged(trainer, slab), slab) for slab in range(len(trainer.slabs))][-1]


def agreed_loss(trainer: GroupTrainer) -> LossSum:
    """The loss of the last stage, on every rank of the group, as its ranks agree on it before a vote."""
    return _agreed(trainer, [trainer.loss_sum()])[0]


def agreed_terms(trainer: GroupTrainer) -> list[LossSum]:
    """The same of each further term of the loss."""
    return _agreed(trainer, sums) if (sums := trainer.term_sums()) else []


def _agreed(trainer: GroupTrainer, sums: Sequence[LossSum | None]) -> list[LossSum]:
    device = next(trainer.parameters_named()).parameter.device
    known = torch.tensor([one or (-math.inf, -math.inf) for one in sums], dtype=torch.float64, device=device)
    dist.all_reduce(known, op=dist.ReduceOp.MAX)
    return [LossSum(total, int(num_tokens)) for total, num_tokens in known.tolist()]


def reference_sums(
    config: RunConfig, parameters: Arrays, work: Sequence[Microbatch], step: int = 0
) -> tuple[float, Arrays]:
    """Loss and gradients summed over the work of a step, of the full model on one rank, by plain autograd."""
    config = replace(config, layout=replace(config.layout, tensor_parallel=1, pipeline_parallel=1, virtual_pipeline=1))
    model, corpus = _full_model(config, parameters), Corpus(config)
    named = dict(model.named_parameters())
    loss_sum = 0.0
    for number in numbers_of(config, work, step):
        batch = on_device(corpus.microbatch(step, number), config, CPU, model.pg_collection.cp)
        mask = batch.get("attention_mask")
        loss = model(batch["tokens"], batch["position_ids"], mask, labels=batch["labels"]).sum()
        loss.backward()
        loss_sum += loss.item()
    gradients = {name: np.zeros_like(value) for name, value in parameters.items()}
    for name, parameter in named.items():
        gradients[name][: len(parameter)] = parameter.grad.numpy()
    return loss_sum, gradients


def token_losses(config: RunConfig, parameters: Arrays) -> tuple[Arrays, np.ndarray]:
    """The batch of step 0, and the loss of each of its tokens by the full model."""
    model, corpus = _full_model(config, parameters), Corpus(config)
    batches = [corpus.microbatch(0, number) for number in numbers_of(config, all_work(config))]
    with torch.no_grad():
        losses = [model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"]) for batch in batches]
    whole = {key: torch.stack([batch[key] for batch in batches]).numpy() for key in batches[0]}
    return whole, torch.stack(losses).numpy()


def _full_model(config: RunConfig, parameters: Arrays) -> torch.nn.Module:
    """With these parameters, and a vocabulary that is not padded."""
    cpu.install()
    transformer = transformer_config(config, CPU)
    spec = get_gpt_layer_local_spec(qk_layernorm=transformer.qk_layernorm, normalization=transformer.normalization)
    spec.submodules.self_attention.submodules.core_attention = TorchCoreAttention
    model = GPTModel(
        config=transformer,
        transformer_layer_spec=spec,
        vocab_size=config.model.vocab_size,
        max_sequence_length=config.model.seq_length,
        share_embeddings_and_output_weights=config.model.tie_embeddings,
        position_embedding_type=config.model.position_embedding,
        rotary_base=config.model.rope_base,
        pg_collection=build_process_groups(config.parallel, CPU, timedelta(seconds=TIMEOUT_S / 2)),
    )
    named = dict(model.named_parameters())
    assert named.keys() == parameters.keys()
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(torch.from_numpy(parameters[name][: len(parameter)]))
    return model


def update_once(config: RunConfig) -> tuple[UpdateResult, Arrays, Arrays, Arrays]:
    """The whole step 0 computed and applied: what the update returned, values before, mean gradients, values after."""
    trainer = GroupTrainer(config, CPU)
    _whole_step(trainer, config)
    before = _values(trainer)
    mean = 1.0 / _num_tokens(config)
    assert isinstance(trainer.slabs[0].gradients, FloatSums), "main_grad holds the sums"
    gradients = {named.name: (named.main_grad * mean).numpy() for named in trainer.parameters_named()}
    result = trainer.update(agreed_loss(trainer))
    return result, before, gradients, _values(trainer)


def whole_update(config: RunConfig) -> tuple[UpdateResult, Arrays, Arrays]:
    """The same without gradients, for sums of any kind."""
    trainer = GroupTrainer(config, CPU)
    _whole_step(trainer, config)
    before = _values(trainer)
    return trainer.update(agreed_loss(trainer)), before, _values(trainer)


def update_several(config: RunConfig, num_steps: int) -> list[Arrays]:
    """This rank's values after each of some steps."""
    trainer = GroupTrainer(config, CPU)
    values = []
    for step in range(num_steps):
        _whole_step(trainer, config, step)
        trainer.update(agreed_loss(trainer))
        values.append(_values(trainer))
    return values


def update_with_a_missing_microbatch(config: RunConfig) -> tuple[str, bool]:
    """What the update raised, and whether the parameters stayed as they were."""
    trainer = GroupTrainer(config, CPU)
    before = trainer.params_sha256()
    trainer.begin_step(0)
    trainer.compute(all_work(config)[:-1])
    reduce_alone(trainer)
    try:
        trainer.update(LossSum(0.0, 0))
    except IncompleteSum as error:
        return str(error), trainer.params_sha256() == before
    return "", False


def refusal_of_a_larger_layout(config: RunConfig) -> str:
    """What building for one more pipeline stage than there are ranks raised."""
    stages = config.layout.pipeline_parallel + 1
    try:
        GroupTrainer(replace(config, layout=replace(config.layout, pipeline_parallel=stages)), CPU)
    except ValueError as error:
        return str(error)
    return ""


def norm_and_buffer(config: RunConfig, factor: float) -> tuple[float, np.ndarray]:
    """The norm of the local sums, and the sums, after every parameter was multiplied by a factor."""
    trainer = GroupTrainer(config, CPU)
    for named in trainer.parameters_named():
        named.parameter.data.mul_(factor)
    trainer.begin_step(0)
    trainer.compute(work_of((0, 0), (1, 0)))
    norms = [
        float(trainer.slabs[0].gradients.norm(bucket)) for bucket in range(len(trainer.slabs[0].gradients.buckets))
    ]
    reduce_alone(trainer)
    trainer.slabs[0].gradients.finish()
    return math.hypot(*norms), np.concatenate([named.main_grad.numpy().ravel() for named in trainer.parameters_named()])


def read_tokens(config: RunConfig, step: int, work: Sequence[Microbatch]) -> Arrays:
    """Tokens and labels of some microbatches, as this rank reads them."""
    corpus = Corpus(config)
    batches = [corpus.microbatch(step, number) for number in numbers_of(config, work, step)]
    return {key: torch.stack([batch[key] for batch in batches]).numpy() for key in ("tokens", "labels")}


def fingerprints(config: RunConfig) -> list[tuple[str, str]]:
    """SHA-256 and digest of the parameters: as built, with one element nudged by the least, and restored."""
    trainer = GroupTrainer(config, CPU)
    element = list(trainer.parameters_named())[3].parameter.data.view(-1)[:1]
    original = element.clone()
    answers = []
    for value in (original, torch.nextafter(original, original + 1), original):
        element.copy_(value)
        hashed = trainer.params_sha256()
        content = [(named.name.encode(), named.parameter.detach().numpy()) for named in trainer.parameters_named()]
        assert hashed == hashlib.sha256(b"".join(name + values.tobytes() for name, values in content)).hexdigest()
        answers.append((hashed, trainer.params_digest().hexdigest()))
    return answers


def probed(
    config: RunConfig, phases: frozenset[FaultPoint], work: Sequence[Microbatch]
) -> list[tuple[FaultPoint, bool]]:
    """The calls of a probe that wants some phases."""
    probe = RecordingProbe(phases)
    probe.trainer = GroupTrainer(config, CPU, probe)
    probe.trainer.begin_step(0)
    probe.trainer.compute(work)
    return probe.calls


def random_numbers_on_tensor_ranks(config: RunConfig) -> list[tuple[float, float]]:
    """Of two tensor-parallel ranks: a number drawn where they differ, and one drawn afterwards."""
    drawn = []
    for tensor_rank in range(2):
        torch.default_generator.manual_seed(5)
        with distinct_on_tensor_ranks(tensor_rank):
            inside = float(torch.rand(()))
        drawn.append((inside, float(torch.rand(()))))
    return drawn


def type_of_a_tensor_on_a_rank(config: RunConfig) -> tuple[str, str]:
    """What `tensor.type()` says to us and, by calling it from there, to Megatron's optimizer."""
    GroupTrainer(config, CPU)
    caller = {"__name__": "megatron.core.optimizer.optimizer"}
    return torch.ones(1).type(), eval("tensor.type()", caller, {"tensor": torch.ones(1)})


def _whole_step(trainer: GroupTrainer, config: RunConfig, step: int = 0) -> None:
    trainer.begin_step(step)
    trainer.compute(all_work(config))
    reduce_alone(trainer)


def _values(trainer: GroupTrainer) -> Arrays:
    return {named.name: named.parameter.detach().clone().numpy() for named in trainer.parameters_named()}


def _num_tokens(config: RunConfig) -> int:
    return len(all_work(config)) * config.train.micro_batch_size * config.model.seq_length
