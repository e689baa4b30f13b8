"""Tokenizes batches of text in worker processes. Results come in the order of the batches, so they do not depend on
the number of workers; at most two batches for each worker are in memory.
"""

import multiprocessing
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from spare_megatron.process.interrupts import never_in_children
from spare_megatron.text.documents import Batch, Skipped, documents_in
from spare_megatron.text.tokenizer import Tokenizer, TokenizerSource, build


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedBatch:
    """The ids of all documents of a batch, each with the one that ends it."""

    tokens: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int64]
    num_text_bytes: int
    num_input_bytes: int
    skipped: Skipped

    def documents(self) -> Iterator[npt.NDArray[np.int32]]:
        ends = np.cumsum(self.lengths).tolist()
        for begin, end in zip([0, *ends], ends, strict=False):
            yield self.tokens[begin:end]


def tokenize(batch: Batch, tokenizer: Tokenizer) -> TokenizedBatch:
    """ValueError: as `documents_in`."""
    skipped = Skipped()
    texts = [document.text for document in documents_in(batch, skipped, is_byte_0_text=tokenizer.is_byte_0_text)]
    end = np.array([tokenizer.end_of_document], np.int32)
    parts: list[npt.NDArray[np.int32]] = []
    lengths = []
    for ids in tokenizer.encode(texts):
        if len(ids):
            parts += [np.asarray(ids, np.int32), end]
            lengths.append(len(ids) + 1)
        else:  # text of which a normalizer leaves nothing
            skipped.documents["empty"] += 1
    return TokenizedBatch(
        tokens=np.concatenate(parts) if parts else np.empty(0, np.int32),
        lengths=np.array(lengths, np.int64),
        num_text_bytes=sum(len(text.encode()) for text in texts),
        num_input_bytes=batch.num_input_bytes,
        skipped=skipped,
    )


@contextmanager
def tokenizing(
    batches: Iterable[Batch], source: TokenizerSource, num_workers: int
) -> Iterator[Iterator[TokenizedBatch]]:
    """The tokenized batches, in order; a single worker is this process. The workers end with the block, however that
    ends. Raises ValueError as `build` and `documents_in`, ChildProcessError if a worker has died.
    """
    if num_workers == 1:
        tokenizer = build(source)
        yield (tokenize(batch, tokenizer) for batch in batches)
        return
    threads = ThreadPoolExecutor(num_workers)
    try:
        with ExitStack() as stack:
            workers: SimpleQueue[_Worker] = SimpleQueue()
            with never_in_children():
                for _ in range(num_workers):
                    workers.put(stack.enter_context(_started(source)))
            yield _in_order(batches, threads, workers, 2 * num_workers)
    finally:
        threads.shutdown(cancel_futures=True)


def _in_order(
    batches: Iterable[Batch], threads: ThreadPoolExecutor, workers: "SimpleQueue[_Worker]", most: int
) -> Iterator[TokenizedBatch]:
    """A thread for each worker sends it a batch and waits for the answer."""

    def tokenized(batch: Batch) -> TokenizedBatch:
        worker = workers.get()
        try:
            return worker.tokenize(batch)
        finally:
            workers.put(worker)

    pending: deque[Future[TokenizedBatch]] = deque()
    for batch in batches:
        pending.append(threads.submit(tokenized, batch))
        if len(pending) == most:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


@dataclass(frozen=True, slots=True)
class _Worker:
    process: BaseProcess
    connection: Connection

    def tokenize(self, batch: Batch) -> TokenizedBatch:
        try:
            self.connection.send(batch)
            answer: TokenizedBatch | ValueError = self.connection.recv()
        except (EOFError, ConnectionError) as error:
            self.process.join()
            raise ChildProcessError(
                f"a worker has ended with exit code {self.process.exitcode}; if memory was short, lower --workers"
            ) from error
        if isinstance(answer, ValueError):
            raise answer
        return answer


@contextmanager
def _started(source: TokenizerSource) -> Iterator[_Worker]:
    """A worker that ends with the block, and also if this process is killed: no other has its connection."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, source), daemon=True)
    process.start()
    try:
        theirs.close()
        yield _Worker(process, ours)
    finally:
        process.terminate()
        process.join()
        ours.close()


def _work(connection: Connection, source: TokenizerSource) -> None:
    with suppress(EOFError, ConnectionError):
        tokenizer = build(source)
        while True:
            batch = connection.recv()
            try:
                connection.send(tokenize(batch, tokenizer))
            except ValueError as error:
                connection.send(ValueError(str(error)))
