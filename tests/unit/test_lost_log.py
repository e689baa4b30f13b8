"""A control store that answers, but has lost what it had confirmed: no process goes on with such a log."""

from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from random import Random

import pytest

from spare_megatron.core.log.entries import Fence, Retry, decode_entry, encode_entry
from spare_megatron.stacking.layout import GroupId, Layout, Member
from spare_megatron.store import decision_log, keys
from spare_megatron.store.decision_log import DecisionLog
from spare_megatron.store.interface import StoreLost, StoreTimeout, lost_key
from spare_megatron.supervisor.store_watch import LinkLost, StoreLink
from spare_megatron.voting.fencing import fence

pytestmark = pytest.mark.timeout(60)

NUM_HISTORIES, NUM_MOVES = 1500, 40
WAIT_S = 20.0


class Rewinding:
    """A store that may go back to what it held earlier, or lose keys."""

    def __init__(self) -> None:
        self.values = {keys.RUN_NAME: "run"}
        self._earlier = [dict(self.values)]

    def put(self, key: str, value: str) -> None:
        self.values[key] = value
        self._earlier.append(dict(self.values))

    def beat(self, key: str, value: str, ttl_s: int) -> None:
        self.put(key, value)

    def put_if_absent(self, key: str, value: str, after: str | None = None) -> str:
        if after is not None and after not in self.values:
            raise lost_key(after)
        if key not in self.values:
            self.put(key, value)
        return self.values[key]

    def get(self, keys: Sequence[str]) -> list[str | None]:
        return [self.values.get(key) for key in keys]

    def exists(self, key: str) -> bool:
        return key in self.values

    def wait(self, key: str, timeout_s: float) -> str:
        if key not in self.values:
            raise StoreTimeout(key)
        return self.values[key]

    def lose(self, random: Random) -> None:
        match random.choice(("everything", "the run", "the log", "the latest")):
            case "everything" | "the run":
                self.values.clear()
            case "the log":
                self.values = {key: value for key, value in self.values.items() if not key.startswith(keys.LOG)}
            case "the latest":
                self.values = dict(random.choice(self._earlier))
        self._earlier = [dict(self.values)]


class Process:
    """One that follows the log in order, and appends to it, until it finds the store lost."""

    def __init__(self, number: int, store: Rewinding, log_type: type[DecisionLog]) -> None:
        self._number = number
        self._store = store
        self._log = log_type(store, check_s=0.0)  # type: ignore[arg-type]
        self._entries: list[str] = []
        self._num_written = 0
        self.is_lost = False

    @property
    def has_lost_log(self) -> bool:
        """Whether an entry that it has acted on is gone, or another one."""
        return any(self._store.values.get(keys.entry(i)) != entry for i, entry in enumerate(self._entries))

    def move(self, random: Random) -> str:
        """One operation on the log. Returns what is wrong with it."""
        has_lost_log = self.has_lost_log
        moves: list[Callable[[], None]] = [self._append, self._wait, self._read, self._poll, self._fence]
        try:
            random.choice(moves)()
        except StoreLost:
            self.is_lost = True
            return ""
        except StoreTimeout:
            pass
        return f"process {self._number} acts on {self._entries}" if has_lost_log else ""

    def _take(self, *entries: str) -> None:
        self._entries += entries

    def _append(self) -> None:
        self._num_written += 1
        # No two entries are equal, as those of a run are not: commits have their time, and attempts their number.
        text = encode_entry(Retry(step=self._number, attempt=self._num_written))
        self._take(self._log.append(len(self._entries), text))

    def _wait(self) -> None:
        self._take(self._log.wait(len(self._entries), 0.1))

    def _read(self) -> None:
        self._take(*self._log.read(len(self._entries), 4))

    def _poll(self) -> None:
        if self._log.has(len(self._entries)):
            self._wait()

    def _fence(self) -> None:
        self._num_written += 1
        index = fence(self._log, Member(GroupId(self._number), self._num_written), "late", len(self._entries))
        self._take(*self._log.written(len(self._entries), index + 1))


def run_history(seed: int, log_type: type[DecisionLog]) -> tuple[str, int]:
    """What is wrong in a history, and how many processes have found that the store has lost their log."""
    random = Random(seed)
    store = Rewinding()
    processes = [Process(number, store, log_type) for number in range(random.randint(2, 4))]
    for _ in range(NUM_MOVES):
        if random.random() < 0.05:
            store.lose(random)
        process = random.choice(processes)
        if not process.is_lost and (wrong := process.move(random)):
            return f"{seed}: {wrong}", 0
    return "", sum(process.is_lost for process in processes)


def run_histories(log_type: type[DecisionLog]) -> tuple[list[str], int]:
    found = [run_history(seed, log_type) for seed in range(NUM_HISTORIES)]
    return [wrong for wrong, _ in found if wrong], sum(num_lost for _, num_lost in found)


def test_no_process_acts_on_a_log_that_went_back() -> None:
    wrong, num_lost = run_histories(DecisionLog)
    assert wrong == []
    assert num_lost > NUM_HISTORIES


class Trusting(DecisionLog):
    """Takes a store that answers for the store of the run."""

    def _require(self) -> None:
        pass


class LooksForTheEntryAlone(DecisionLog):
    """Takes another entry in the place of the newest for the same log."""

    def _require(self) -> None:
        self._newest = None
        super()._require()

    def note(self, index: int, entry: str) -> None:
        self._newest = None
        super().note(index, entry)


@pytest.mark.parametrize("log_type", [Trusting, LooksForTheEntryAlone])
def test_the_histories_find_a_log_that_does_not_look(log_type: type[DecisionLog]) -> None:
    wrong, _ = run_histories(log_type)
    assert len(wrong) > 10


def log_of(store: Rewinding, num_entries: int, check_s: float = 0.0) -> DecisionLog:
    log = DecisionLog(store, check_s)  # type: ignore[arg-type]
    for number in range(num_entries):
        log.append(number, encode_entry(Retry(step=0, attempt=number)))
    return log


def test_no_entry_is_written_after_one_that_is_gone() -> None:
    """The log was looked up just before: only the write itself can see that nothing has happened since."""
    store = Rewinding()
    log = log_of(store, 3, check_s=60.0)
    store.values.clear()
    with pytest.raises(StoreLost, match=keys.entry(2)):
        log.append(3, encode_entry(Retry(step=0, attempt=3)))
    assert store.values == {}


@pytest.mark.parametrize("num_entries", [0, 3])
def test_a_waiting_process_finds_that_the_store_was_emptied(num_entries: int) -> None:
    """With entries by the newest of them, before the first one by the name of the run."""
    store = Rewinding()
    log = log_of(store, num_entries)
    assert not log.has(num_entries)
    store.values.clear()
    with pytest.raises(StoreLost, match=keys.entry(2) if num_entries else keys.RUN_NAME):
        log.wait(num_entries, WAIT_S)


def test_a_store_without_the_name_of_a_run_has_lost_nothing() -> None:
    """The embedded store has none."""
    store = Rewinding()
    store.values.clear()
    log = log_of(store, 0)
    assert not log.has(0)
    with pytest.raises(StoreTimeout, match=f"{keys.entry(0)} was not written within 5 s"):
        log.wait(0, 5.0)


def test_a_fence_is_not_written_into_a_log_that_is_shorter_than_is_known() -> None:
    store = Rewinding()
    log_of(store, 7)
    store.values.clear()
    with pytest.raises(StoreLost):
        fence(DecisionLog(store), Member(GroupId(0)), "dead", from_index=7)  # type: ignore[arg-type]
    assert store.values == {}


def test_what_is_known_is_looked_up_only_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(decision_log.time, "monotonic", lambda: now_s[0])
    store = Rewinding()
    log = log_of(store, 3, check_s=2.0)
    assert not log.has(3)
    reads: list[Sequence[str]] = []
    get = store.get
    monkeypatch.setattr(store, "get", lambda keys: reads.append(keys) or get(keys))
    for _ in range(10):
        now_s[0] += 0.5
        assert not log.has(3)
    assert len(reads) == 2


def test_a_supervisor_reports_the_loss_of_a_log_that_its_ranks_have_read() -> None:
    store = Rewinding()
    log_of(store, 5)
    inbox, outbox = Pipe(duplex=False)
    link = StoreLink(
        node=0,
        layout=Layout(num_groups=2),
        interval_s=0.05,
        connect=lambda: store,  # type: ignore[arg-type,return-value]
        outbox=outbox,
    )
    link.head = 5
    store.values = {key: value for key, value in store.values.items() if key != keys.entry(4)}
    link.start()
    assert inbox.poll(WAIT_S)
    lost = inbox.recv()
    assert isinstance(lost, LinkLost)
    assert keys.entry(4) in lost.reason
    assert not any(isinstance(decode_entry(text), Fence) for key, text in store.values.items() if keys.LOG in key)
