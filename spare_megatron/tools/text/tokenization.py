"""Tokenizes batches of text in worker processes. Results come in the order of the batches, so they do not depend on
the number of workers; at most two batches for each worker are in memory.
"""

import multiprocessing
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from spare_megatron.machine.interrupts import never_in_children
from spare_megatron.tools.text.documents import Batch, Document, Skipped, documents_in
from spare_megatron.tools.text.tokenizer import Ids, Tokenizer, TokenizerSource, build, library_errors


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
    """ValueError: as `documents_in`, or the tokenizer cannot encode a document without the id that ends it."""
    skipped = Skipped()
    documents = list(documents_in(batch, skipped, is_byte_0_text=tokenizer.is_byte_0_text))
    end = np.array([tokenizer.end_of_document], np.int32)
    parts: list[npt.NDArray[np.int32]] = []
    lengths = []
    for document, found in zip(documents, _encoded(documents, tokenizer), strict=True):
        ids = np.asarray(found, np.int32)
        if (ids == end).any():
            ids = np.asarray(_spelled_out(document, tokenizer), np.int32)
        if ids.size:
            parts += [ids, end]
            lengths.append(ids.size + 1)
        else:  # text of which a normalizer leaves nothing
            skipped.documents["empty"] += 1
    return TokenizedBatch(
        tokens=np.concatenate(parts) if parts else np.empty(0, np.int32),
        lengths=np.array(lengths, np.int64),
        num_text_bytes=sum(len(document.text.encode()) for document in documents),
        num_input_bytes=batch.num_input_bytes,
        skipped=skipped,
    )


def _encoded(documents: Sequence[Document], tokenizer: Tokenizer) -> Sequence[Ids]:
    """Where the library fails, each alone, to name the one that it fails at."""
    if not documents:
        return []
    try:
        with library_errors(f"{documents[0].where} cannot be encoded by {tokenizer.name}"):
            return tokenizer.encode([document.text for document in documents])
    except ValueError:
        if len(documents) == 1:
            raise
        return [ids for document in documents for ids in _encoded([document], tokenizer)]


def _spelled_out(document: Document, tokenizer: Tokenizer) -> Ids:
    """The ids of a text that has the one that ends a document among those that it is encoded as at first."""
    with library_errors(
        f"{document.where} has text that {tokenizer.name} encodes as token {tokenizer.end_of_document}, which ends "
        f"documents; name another with --end-of-document, or change the text"
    ):
        return tokenizer.spell_out(document.text)


@contextmanager
def tokenizing(
    batches: Iterable[Batch], source: TokenizerSource, num_workers: int
) -> Iterator[Iterator[TokenizedBatch]]:
    """The tokenized batches, in order; a single worker is this process. The workers end with the block, however that
    ends. Raises ValueError as `build` and `tokenize`, and if a worker has died.
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
    """A thread for each worker sends it a batch and waits for the answer. Errors come in the order of batches, too."""

    def all_batches() -> Iterator[Batch | ValueError]:
        try:
            yield from batches
        except ValueError as error:
            yield error

    def tokenized(batch: Batch | ValueError) -> TokenizedBatch:
        if isinstance(batch, ValueError):
            raise batch
        worker = workers.get()
        try:
            return worker.tokenize(batch)
        finally:
            workers.put(worker)

    pending: deque[Future[TokenizedBatch]] = deque()
    for batch in all_batches():
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
            answer: TokenizedBatch | ValueError | MemoryError = self.connection.recv()
        except (EOFError, ConnectionError) as error:
            self.process.join()
            code = self.process.exitcode
            why = "its message is above" if code and code > 0 else "if memory was short, lower --workers"
            raise ValueError(f"a worker has ended with exit code {code}; {why}") from error
        if isinstance(answer, ValueError | MemoryError):
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
            except (ValueError, MemoryError) as error:
                kind = MemoryError if isinstance(error, MemoryError) else ValueError
                connection.send(kind(str(error)))
