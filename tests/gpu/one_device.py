"""A process with a device of its own, and what it is asked to do there.

Tasks take the device and the configuration first and return something that can be pickled. All of them also run on a
CPU, which shows on every machine that they measure what they say.
"""

import contextlib
import mmap
import multiprocessing
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.enums import AttnMaskType

from spare_megatron.config.schema import RunConfig
from spare_megatron.formats.pieces import pieces_of
from spare_megatron.mcore import state
from spare_megatron.mcore.gradients import host_copies
from spare_megatron.mcore.gradients.digests import TensorsDigest
from spare_megatron.mcore.model.attention import TorchCoreAttention, chunks_of, document_mask
from spare_megatron.mcore.model.batches import on_device
from spare_megatron.mcore.model.model import choose_deterministic_kernels
from spare_megatron.mcore.model.training_samples import Corpus
from spare_megatron.mcore.optimizer import parameters
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.process.snapshot_wire import Part
from spare_megatron.stacking.layout import PartitionId
from spare_megatron.stacking.plans import Microbatch
from spare_megatron.state.snapshot import mapped_files
from spare_megatron.state.snapshot.mapped_files import MappedFiles
from spare_megatron.state.transfer.piece_client import PieceClient
from spare_megatron.state.transfer.piece_server import PieceServer
from spare_megatron.state.transfer.state_transfer import StateSource
from tests.integration.mcore_group import Arrays, all_work, reduce_alone, staged
from tests.integration.mcore_state_group import hand_over
from tests.search_path import put_checkout_first

GPU = "cuda:0"
DEVICES = ["cpu", pytest.param(GPU, marks=pytest.mark.gpu)]
TIMEOUT_S = 300.0
"""The first kernels of a process are loaded and, by transformer-engine, compiled."""


def run_on(device: str, task: Callable[..., Any], config: RunConfig, *arguments: Any) -> Any:
    """What the task returned, in a process that is the only rank of its world."""
    (answer,) = run_ranks_on(1, device, task, config, *arguments)
    return answer


def run_ranks_on(
    num_ranks: int, device: str, task: Callable[..., Any], config: RunConfig, *arguments: Any
) -> list[Any]:
    """What the task returned on each rank of a world, in processes that share a device."""
    context = multiprocessing.get_context("forkserver" if device == "cpu" else "spawn")  # CUDA cannot be forked
    context.set_forkserver_preload(["spare_megatron.mcore.trainer", __name__])
    os.environ["OMP_NUM_THREADS"] = "1"
    put_checkout_first()
    with tempfile.TemporaryDirectory() as folder:
        receivers, processes = [], []
        for rank in range(num_ranks):
            receiver, sender = context.Pipe(duplex=False)
            place = (rank, num_ranks, f"{folder}/store")
            process = context.Process(target=_run, args=(device, place, sender, task, config, arguments))
            process.start()
            sender.close()
            receivers.append(receiver)
            processes.append(process)
        try:
            return [_answer(device, receiver) for receiver in receivers]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _answer(device: str, receiver: Connection) -> Any:
    if not receiver.poll(TIMEOUT_S):
        raise TimeoutError(f"no answer from {device} within {TIMEOUT_S:g} s")
    answer, error = receiver.recv()
    if error:
        raise RuntimeError(f"on {device}:\n{error}")
    return answer


def _run(
    name: str,
    place: tuple[int, int, str],
    sender: Connection,
    task: Callable[..., Any],
    config: RunConfig,
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    rank, num_ranks, store = place
    try:
        device = torch.device(name)
        if device.type == "cuda":
            os.environ["NCCL_HOSTID"] = f"rank {rank}"  # else NCCL refuses ranks that share a device
            choose_deterministic_kernels(config)
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.FileStore(store, num_ranks),
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=TIMEOUT_S / 2),
        )
        sender.send((task(device, config, *arguments), None))
        dist.barrier()  # a rank that left would break the connections of one that still computes
    except Exception:  # noqa: BLE001  (the parent shall see it, whatever it is)
        sender.send((None, traceback.format_exc()))


# ------------------------------------------------------------------------------------------------------------ tasks


def values_and_gradients(device: torch.device, config: RunConfig) -> tuple[Arrays, Arrays]:
    """Of each parameter its value and its gradient, summed over all microbatches of step 0."""
    trainer = GroupTrainer(config, device)
    trainer.begin_step(0)
    trainer.compute(all_work(config))
    reduce_alone(trainer)
    trainer.slabs[0].gradients.finish()
    named = list(trainer.parameters_named())
    values = {item.name: item.parameter.detach().float().cpu().numpy() for item in named}
    return values, {item.name: item.main_grad.float().cpu().numpy() for item in named}


def sums_of(device: torch.device, config: RunConfig, *ways: Sequence[Sequence[Microbatch]]) -> list[np.ndarray]:
    """What is staged of step 0 for each way to compute it, a way being the works of its calls."""
    trainer = GroupTrainer(config, device)
    found = []
    for calls in ways:
        trainer.begin_step(0)
        for work in calls:
            trainer.compute(work)
        found.append(staged(trainer).cpu().numpy())
    return found


def attention_within_documents(device: torch.device, config: RunConfig) -> list[Arrays]:
    """What the attention of the first layer yields, and the gradients of query, key and value: with the documents of
    the first microbatch, by the mask of all pairs in fp32 on the CPU, and on the CPU without any mask. All are those of
    the places that this rank computes; the CPU has the whole sequence.
    """
    trainer, (batch, size) = GroupTrainer(config, device), (Corpus(config).microbatch(0, 0), config.model)
    layer = next(part for name, part in trainer.chunks[0].module.named_modules() if name.endswith("core_attention"))
    groups = trainer.process_groups
    alone = SimpleNamespace(tp=groups.tp, cp=groups.dp)
    reference = TorchCoreAttention(
        layer.config, 1, AttnMaskType.causal, "self", attention_dropout=0.0, pg_collection=alone
    )
    places = [place for chunk in chunks_of(size.seq_length, groups.cp) for place in chunk]
    given = on_device(batch, config, device, groups.cp)["attention_mask"]
    mask = document_mask(batch["tokens"], config.data.end_of_document)
    dtype = torch.float32 if config.model.precision == "fp32" else torch.bfloat16
    shape = size.seq_length, config.train.micro_batch_size, size.num_attention_heads, -1
    hidden = torch.randn(4, *shape[:2], size.hidden_size, generator=torch.Generator().manual_seed(3))
    found = []
    for attend, place, precision, keeps_apart in (
        (layer, device, dtype, given),
        (reference, torch.device("cpu"), torch.float32, mask),
        (reference, torch.device("cpu"), torch.float32, None),
    ):
        here = hidden[:, places] if attend is layer else hidden
        *inputs, weights = (part.to(dtype).to(place, precision) for part in here)
        three = [part.reshape(len(part), *shape[1:]).requires_grad_() for part in inputs]
        attended = attend(*three, keeps_apart, attn_mask_type=AttnMaskType.causal)
        gradients = torch.stack(torch.autograd.grad(attended, three, weights))
        results = {"attended": attended.detach(), "gradients": gradients.transpose(0, 1)}
        if attend is not layer:
            results = {name: tensor[places] for name, tensor in results.items()}
        found.append({name: tensor.float().cpu().numpy() for name, tensor in results.items()})
    return found


def unsound_buckets(device: torch.device, config: RunConfig) -> tuple[list[int], dict[int, float]]:
    """What the sums of buckets say, of which the last half is poisoned; and their norms. Staging must not wait."""
    trainer = GroupTrainer(config, device)
    sums = trainer.slabs[0].gradients
    trainer.begin_step(0)
    trainer.compute(all_work(config))
    staged = []
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    for bucket in range(len(sums.buckets)):
        if bucket == len(sums.buckets) // 2:
            sums.poison()
        sums.measure(bucket, sys.float_info.max)
        staged.append(sums.stage(bucket, sums.new_staging()))
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    return [sums.on_summed(bucket, part) for bucket, part in enumerate(staged)], sums.norms()


def losses_of_steps(device: torch.device, config: RunConfig, num_steps: int) -> list[float]:
    """The mean loss of each step."""
    trainer = GroupTrainer(config, device)
    return [_train(trainer, config, step) for step in range(num_steps)]


def continued(device: torch.device, config: RunConfig) -> tuple[bytes, bytes, bytes]:
    """The state after four steps: of one trainer; of one with its state after two, from its memory; from a file."""
    through = GroupTrainer(config, device)
    for step in range(2):
        _train(through, config, step)
    from_memory, from_file = GroupTrainer(config, device), GroupTrainer(config, device)
    hand_over(through, from_memory)
    with tempfile.TemporaryDirectory() as folder:
        through.save_state(Path(folder) / "state")
        from_file.load_state([Path(folder) / "state"])
    trainers = through, from_memory, from_file
    for step in range(2, 4):
        for trainer in trainers:
            _train(trainer, config, step)
    return tuple(map(_whole_state, trainers))


def copied_beside_training(
    device: torch.device, config: RunConfig, is_registered: bool = False
) -> tuple[bytes, bytes, bytes]:
    """The state after a step: copied at once; copied by a thread while the next step computes; and after its update."""
    host_copies.BUFFER_BYTES = 10_007  # so that there are many batches
    trainer = GroupTrainer(config, device)
    _train(trainer, config, 0)
    before = _whole_state(trainer)
    copy = trainer.state_copy()
    mapped, fd = MappedFiles(torch.cuda.cudart() if is_registered else None), os.memfd_create("copied")
    os.truncate(fd, copy.num_bytes)
    mapped_files.RANGE_BYTES = 2**20
    file = mapped.map(Part(0), fd)
    mapped.register()
    assert (mapped.registered_bytes, mapped.failure) == (copy.num_bytes * is_registered, "")
    thread = threading.Thread(target=copy.write, args=(file.memory, file.range_bytes))
    thread.start()
    trainer.begin_step(1)
    trainer.compute(all_work(config))
    thread.join()
    trainer.update(reduce_alone(trainer).loss)
    copied = file.memory[:]
    mapped.keep(())
    os.close(fd)
    return before, copied, _whole_state(trainer)


def joined_beside_training(device: torch.device, config: RunConfig) -> tuple[bytes, bytes, tuple[str, ...]]:
    """A state after a step and what a newcomer has of it that fetches it, over a socket, while the next step computes.

    Also the digests of parameters and of all else of both, after the same step more.
    """
    donor, newcomer = GroupTrainer(config, device), GroupTrainer(config, device)
    _train(donor, config, 0)
    before, source = _whole_state(donor), StateSource()
    outgoing = donor.outgoing_state()
    source.offer(1, {"tensors": outgoing.tensors})
    server = PieceServer("127.0.0.1", source, TIMEOUT_S)
    server.start()
    failures: list[BaseException] = []

    def fetch() -> None:
        try:
            incoming = newcomer.incoming_state(outgoing.description)
            with contextlib.closing(PieceClient(server.address, TIMEOUT_S)) as client, incoming.tensors.writing() as to:
                for piece in client.fetch_each("tensors", 1, pieces_of(outgoing.tensors.num_bytes), to.room):
                    to.write(piece)
            incoming.install()
        except Exception as error:  # noqa: BLE001  (raised below)
            failures.append(error)

    thread = threading.Thread(target=fetch)
    thread.start()
    donor.begin_step(1)
    donor.compute(all_work(config))
    thread.join()
    if failures:
        raise failures[0]
    with source.changing(2):
        donor.update(reduce_alone(donor).loss)
    server.close()
    taken = _whole_state(newcomer)
    _train(newcomer, config, 1)
    digests = (
        one.hexdigest() for trainer in (donor, newcomer) for one in (trainer.params_digest(), trainer.rest_of_state())
    )
    return before, taken, tuple(digests)


def partitions_copied_beside_training(device: torch.device, config: RunConfig) -> tuple[list[bytes], list[bytes]]:
    """The state of all partitions after a step; and of a newcomer that installs it while the next step computes."""
    numbers = [PartitionId(number) for number in range(config.layout.num_groups)]
    donor, newcomer = GroupTrainer(config, device, hosted=numbers), GroupTrainer(config, device)
    assert donor.stacked is not None
    assert newcomer.stacked is not None
    _train(donor, config, 0)
    before = [rows.cpu().numpy().tobytes() for rows in donor.stacked.whole_partitions().values()]
    newcomer.stacked.schedule.step(increment=1)
    donor.begin_step(1)
    donor.compute(all_work(config))
    newcomer.begin_step(1)
    newcomer.compute(all_work(config))
    for number in numbers:
        for piece in range(donor.stacked.partitions.num_pieces(number)):
            assert newcomer.stacked.install_piece(number, piece, donor.stacked.read_piece(number, piece))
    return before, [rows.cpu().numpy().tobytes() for rows in newcomer.stacked.whole_partitions().values()]


def digests_of_copies(device: torch.device, config: RunConfig) -> tuple[list[str], list[str]]:
    """Of parameters and optimizer state after a step and of bytes of any length: there, and of copies on the CPU."""
    trainer = GroupTrainer(config, device)
    _train(trainer, config, 0)
    generator = torch.Generator().manual_seed(1)
    sizes = (0, 1, 4097, 3 * 10**7 + 1)
    odd = [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).to(device)[1:] for size in sizes]
    named = [(item.name, item.parameter) for item in trainer.parameters_named()]
    tensors = [*named, *((str(len(each)), each) for each in odd)]
    there = [TensorsDigest(tensors), trainer.params_digest(), trainer.rest_of_state()]
    params, rest = trainer.params_digest, trainer.rest_of_state
    here = [TensorsDigest([(name, tensor.cpu()) for name, tensor in tensors])]
    with mock.patch.object(parameters, "TensorsDigest", _on_cpu), mock.patch.object(state, "TensorsDigest", _on_cpu):
        here += [params(), rest()]
    return [each.hexdigest() for each in there], [each.hexdigest() for each in here]


def _on_cpu(tensors: Iterable[tuple[str, torch.Tensor]], head: str = "") -> TensorsDigest:
    return TensorsDigest([(name, tensor.cpu()) for name, tensor in tensors], head)


def _whole_state(trainer: GroupTrainer) -> bytes:
    copy = trainer.state_copy()
    memory = mmap.mmap(-1, copy.num_bytes)
    copy.write(memory)
    return memory[:]


def _train(trainer: GroupTrainer, config: RunConfig, step: int) -> float:
    trainer.begin_step(step)
    trainer.compute(all_work(config))
    return trainer.update(reduce_alone(trainer).loss).loss
