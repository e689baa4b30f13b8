"""A bucket of gradients summed for everybody beside one whose parts are summed for their recipients, over gloo.

One process for each group, in turn with one communicator. With as many parts as groups, a bucket is all gradients of a
rank; with one part, it lies within a partition, whose owner is another group in each round. With `--exact` the bucket
has int64 numbers, and the other way is a reduce-scatter and an all-gather of the sums in fp32.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.origin import origin
from spare_megatron.comm.transfers import Exchange, Share, SharedBackend, Transfer, _Awaited

TIMEOUT = timedelta(seconds=120)
POLL_S = 0.0005
EXTRAS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--elements", type=int, default=1_000_000, help="gradients in the bucket")
    parser.add_argument("--exact", action="store_true", help="int64 sums, reduce-scattered and gathered in fp32")
    parser.add_argument("--parts", type=int, default=1, help="partitions that the bucket lies in")
    parser.add_argument("--redundancy", type=int, default=2, help="recipients of each")
    parser.add_argument("--rounds", type=int, default=20, help="sums of each kind")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    context = get_context("fork")  # with what is imported here
    with tempfile.TemporaryDirectory() as folder:
        receiver, sender = context.Pipe(duplex=False)
        members = [
            context.Process(target=_run, args=(options, rank, Path(folder) / "store", sender if not rank else None))
            for rank in range(options.groups)
        ]
        for member in members:
            member.start()
        if not receiver.poll(TIMEOUT.total_seconds()):
            raise TimeoutError(f"the groups did not answer within {TIMEOUT.total_seconds():g} s")
        spent_s, sent_bytes = receiver.recv()
        for member in members:
            member.join(TIMEOUT.total_seconds())
    found = {kind: statistics.median(of_kind) for kind, of_kind in spent_s.items()}
    ratio = found["scattered"] / found["all_reduced"]
    num_values = options.rounds * options.groups * options.elements
    per_value = {kind: of_kind / num_values for kind, of_kind in sent_bytes.items()}
    if options.json:
        print(json.dumps({"ratio": ratio, "median_s": found, "bytes_per_gradient": per_value} | origin()))
        return
    for kind, median_s in found.items():
        print(f"{kind}: {median_s * 1e3:.1f} ms, {per_value[kind]:.2f} bytes a gradient and group")
    print(f"ratio {ratio:.3f}")


def _run(options: argparse.Namespace, rank: int, store: Path, results: Connection | None) -> None:
    torch.set_num_threads(1)
    size = options.groups
    backend = dist.ProcessGroupGloo(dist.FileStore(str(store), size), rank, size, TIMEOUT)
    exchange = Exchange(backend, rank, is_polled=False)
    buffer = torch.zeros(options.elements + EXTRAS, dtype=torch.int64 if options.exact else torch.float32)
    spent_s: dict[str, list[float]] = {"all_reduced": [], "scattered": []}
    sent_bytes = dict.fromkeys(spent_s, 0)
    for number in range(options.rounds):
        for kind in spent_s:
            backend.barrier(dist.BarrierOptions()).wait()
            began_s, before = time.perf_counter(), _sent_bytes()
            transfer = Transfer(connection=SharedBackend(backend, buffer.device, 60.0), tensors=[buffer])
            if kind == "all_reduced":
                transfer.works = [backend.allreduce([buffer], dist.AllreduceOptions())]
            elif options.exact:
                _post_exact(transfer, backend, buffer, rank, size)
            else:
                exchange.post(transfer, _shares(options, buffer, number), buffer[-EXTRAS:], number * options.parts)
            while not transfer.advance():
                time.sleep(POLL_S)
            backend.barrier(dist.BarrierOptions()).wait()
            spent_s[kind].append(time.perf_counter() - began_s)
            sent_bytes[kind] += _sent_bytes() - before
    if results is not None:
        results.send((spent_s, sent_bytes))
    backend.barrier(dist.BarrierOptions()).wait()


def _post_exact(transfer: Transfer, backend: dist.ProcessGroupGloo, buffer: torch.Tensor, rank: int, size: int) -> None:
    """The extras are summed for all, as they are now; what a strip lacks at the end is left out."""
    strip = (len(buffer) - EXTRAS) // size
    summed, gathered = torch.empty(strip, dtype=torch.int64), torch.empty(size * strip)
    whole = buffer[: size * strip]
    scattered = backend._reduce_scatter_base(summed, whole, dist.ReduceScatterOptions())
    # Of this kind `wait()` alone reports the end.
    transfer.works = [_Awaited([scattered]), backend.allreduce([buffer[-EXTRAS:]], dist.AllreduceOptions())]
    transfer.follow = lambda: [backend._allgather_base(gathered, summed.float())]


def _shares(options: argparse.Namespace, buffer: torch.Tensor, number: int) -> list[Share]:
    parts = buffer[:-EXTRAS].split(-(-options.elements // options.parts))
    owners = [(number * options.parts + part) % options.groups for part in range(len(parts))]
    return [
        (values, tuple((owner + k) % options.groups for k in range(options.redundancy)))
        for values, owner in zip(parts, owners, strict=True)
    ]


def _sent_bytes() -> int:
    """Of all that goes through the loopback interface."""
    [line] = [line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:")]
    return int(line.split()[9])


if __name__ == "__main__":
    main()
