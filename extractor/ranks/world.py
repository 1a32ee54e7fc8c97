"""Who this rank is, and how ranks speak to each other before and beside the model.

A world of tp x replicas ranks, as torchrun's environment describes it; one process without torchrun
is the small case of the same. Each replica gets process groups of its own, so that replicas never
wait for each other on the GPU; across replicas there is only torchrun's key-value store.
"""

import contextlib
import json
import queue
import threading
import time
import uuid
from collections.abc import Callable, Generator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from extractor.errors import RunError
from extractor.progress import say
from extractor.ranks.place import Place
from extractor.ranks.signals import Stopped
from extractor.records import Batch
from extractor.torchrun import Launch

# Ranks wait for rank 0 while it tokenizes or while its disk is slow: hours are normal there. A dead
# rank is noticed all the same, because torchrun ends the others and gloo sees its socket close.
PATIENCE = timedelta(days=7)

# How long rank 0 waits for the others at the end.
FAREWELL_SECONDS = 10.0

# How long a rank waits for rank 0 of another node to have begun.
WELCOME_SECONDS = 600.0

# How long a rank waits for the store of torchrun's agent, and for that of rank 0 where no agent has
# one; and after how long it says so.
AGENT_SECONDS, HOST_SECONDS = 30.0, 120.0
SAID_AFTER_SECONDS = 5.0
_STOP = -1


class World:
    """The store that all ranks share and this replica's groups. Make one a process, and close it."""

    def __init__(self, place: Place, stopping: Callable[[], bool] = lambda: False) -> None:
        """stopping: whether this rank was asked to stop, so that it does not wait for long.

        Raises RunError when rank 0, or torchrun's store, does not come in time."""
        self.place = place
        store = _open_store(place, stopping)
        with _store_errors():
            self._store = dist.PrefixStore(f"extractor/{_life(store, place, stopping)}", store)

    # Rank 0's word to all others -------------------------------------------------------------

    def tell(self, key: str, value: Any) -> None:
        """Publish a JSON value under a key."""
        with _store_errors():
            self._store.set(key, json.dumps(value))

    def hear(self, key: str, while_waiting: Callable[[], None] = lambda: None) -> Any:
        """Wait, for as long as it takes, for the value that another rank tells.

        while_waiting is called now and then and may raise, to give up."""
        pause = 0.01
        with _store_errors():
            while not self._store.check([key]):
                try:
                    while_waiting()
                except BaseException:
                    if self._store.check([key]):  # told in the same moment
                        break
                    raise
                time.sleep(pause)
                pause = min(pause * 1.5, 0.5)
            return json.loads(self._store.get(key))

    def next_number(self, key: str) -> int:
        """0, 1, 2, ... over all callers of all ranks."""
        with _store_errors():
            return int(self._store.add(key, 1)) - 1

    # A replica's ranks take a step together or not at all, whichever is stopped at what moment ----

    def meet(self, what: str, while_waiting: Callable[[], None]) -> bool:
        """Waits until all ranks of this replica are here. False when one has called it off.

        while_waiting may raise (see hear); then call_off() tells what the others will do."""
        key = f"{what}/{self.place.replica}"
        with _store_errors():
            if self._store.add(f"{key}/here", 1) == self.place.tp:
                self._decide(key, "go")
        return self.hear(key, while_waiting) == "go"

    def call_off(self, what: str, replica: int) -> bool:
        """Keep a replica's ranks from going on. False when they have met already."""
        with _store_errors():
            return self._decide(f"{what}/{replica}", "stop") == "stop"

    def _decide(self, key: str, wish: str) -> str:
        """The first wish of any rank is what happens."""
        return json.loads(self._store.compare_set(key, "", json.dumps(wish)))

    def board(self) -> "Board":
        """The same store over a connection of its own, for the watch's thread."""
        return Board(self._store if self.place.world_size == 1 else self._store.clone())

    # The replica's own groups ----------------------------------------------------------------

    def join_replica(self, device: torch.device) -> None:
        """Make the process groups that SGLang builds on: NCCL or gloo among the tp ranks."""
        place = self.place
        store = dist.PrefixStore(f"replica{place.replica}", self._store)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend="nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=place.tp_rank,
            world_size=place.tp,
            timeout=timedelta(minutes=10),
        )
        self._control: Any = dist.new_group(backend="gloo", timeout=PATIENCE)

    def share_batch(self, batch: Batch | None) -> Batch | None:
        """From the writer to its replica: the next batch, or None for the end.

        The writer gives it and gets it back; the other ranks give None and get a batch without
        samples. One small gloo broadcast of the shape and one of lengths and ids."""
        if self.place.tp == 1:
            return batch
        if self.place.is_writer:
            shape = [_STOP, 0, 0] if batch is None else [batch.number, len(batch.lengths), 0]
            if batch is not None:
                shape[2] = batch.num_tokens
            header = torch.tensor(shape, dtype=torch.int64)
        else:
            header = torch.empty(3, dtype=torch.int64)
        dist.broadcast(header, 0, self._control)
        number, sequences, tokens = header.tolist()
        if number == _STOP:
            return None
        if batch is not None:
            body = torch.cat([torch.tensor(batch.lengths, dtype=torch.int64), batch.input_ids])
        else:
            body = torch.empty(sequences + tokens, dtype=torch.int64)
        dist.broadcast(body, 0, self._control)
        if batch is not None:
            return batch
        return Batch(number, tuple(body[:sequences].tolist()), body[sequences:].clone())

    def least(self, value: int) -> int:
        """The smallest of the replica's values, so that all its ranks plan alike."""
        if self.place.tp == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.int64)
        dist.all_reduce(tensor, dist.ReduceOp.MIN, self._control)
        return int(tensor)

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        if self.place.world_size > 1:
            with contextlib.suppress(RunError), _store_errors():
                self._leave_last()

    def _leave_last(self) -> None:
        """Rank 0 goes when the others have gone: it may be the store's host, and torchrun ends those
        that are left as soon as one exits with anything but 0."""
        if self.place.rank:
            self._store.add("left", 1)
            return
        end = time.monotonic() + FAREWELL_SECONDS
        while self._store.add("left", 0) < self.place.world_size - 1 and time.monotonic() < end:
            time.sleep(0.05)


class Board:
    """Notes of ranks to each other: the watch's side of the store. Raises RunError when it is gone."""

    def __init__(self, store: dist.Store) -> None:
        self._store = dist.PrefixStore("watch", store)

    def post(self, key: str, value: Any) -> None:
        with _store_errors():
            self._store.set(key, json.dumps(value))

    def look(self, key: str) -> Any | None:
        """What is there under a key, or None; never waits."""
        with _store_errors():
            return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def first(self, key: str) -> bool:
        with _store_errors():
            return self._store.add(key, 1) == 1


@contextlib.contextmanager
def _store_errors() -> Generator[None]:
    try:
        yield
    except dist.DistError as error:
        raise RunError(
            "torchrun's store does not answer: torchrun, or the node that it began on, is gone"
        ) from error


def is_broken_connection(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone: that rank's reason is the reason."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error)
    )


def _open_store(place: Place, stopping: Callable[[], bool]) -> dist.Store:
    """torchrun's own store, by the address it gives; nothing here listens on a port of its own,
    except in a world without torchrun's agent store, where rank 0 must.

    Raises RunError when there is none in time, and Stopped when this rank is asked to stop before."""
    launch = Launch.from_environment()
    if not launch.host:
        return dist.HashStore()
    # An agent's store is there before its ranks are, or the agent has died since.
    patience = AGENT_SECONDS if launch.agent_has_store else HOST_SECONDS
    opened: queue.Queue[dist.Store | Exception] = queue.Queue()
    # In a thread, because the connection is made in C code, where no signal handler runs.
    threading.Thread(target=_connect, args=(launch, patience, opened), daemon=True).start()
    where = f"{launch.host}:{launch.port}"
    whose = "torchrun's store" if launch.agent_has_store else "the store of rank 0"
    begun, said = time.monotonic(), False
    while (waited := time.monotonic() - begun) < patience:
        with contextlib.suppress(queue.Empty):
            store = opened.get(timeout=0.2)
            if isinstance(store, Exception):
                raise RunError(f"cannot reach {whose} at {where}: {_first_line(store)}") from store
            store.set_timeout(timedelta(seconds=patience))
            return store
        if stopping():
            raise Stopped("while connecting")
        if waited > SAID_AFTER_SECONDS and not said:
            say(f"rank {place.rank} waits for {whose} at {where}, for at most {patience:.0f} s")
            said = True
    raise RunError(
        f"rank {place.rank} has not reached {whose} at {where} in {patience:.0f} s: "
        "start all ranks, rank 0 among them, as torchrun does"
    )


def _connect(
    launch: Launch, patience: float, opened: "queue.Queue[dist.Store | Exception]"
) -> None:
    try:
        store = dist.TCPStore(
            launch.host,
            launch.port,
            world_size=launch.world_size,
            is_master=launch.rank == 0 and not launch.agent_has_store,
            # Longer than anybody waits for it: what it gives up is said by the one who waits.
            timeout=timedelta(seconds=2 * patience),
            wait_for_workers=False,
        )
    except (RuntimeError, OSError, ValueError) as error:
        opened.put(error)
    else:
        opened.put(store)


def _first_line(error: Exception) -> str:
    """Without the C++ stack that PyTorch adds."""
    return str(error).partition("\n")[0]


def _life(store: dist.Store, place: Place, stopping: Callable[[], bool]) -> str:
    """A name for this life of the group, the same on all its ranks: what an earlier life left in the
    store must not be read in this one.

    One agent counts its restarts. Those of several nodes do not agree: a node whose ranks were
    started again because of another's failure does not count that one. There rank 0 makes a name, and
    gives it to whoever asks. Raises RunError when it does not."""
    if place.nodes == 1:
        return str(place.restart)
    if place.rank == 0:
        life = uuid.uuid4().hex
        keeper = threading.Thread(
            target=_welcome, args=(store.clone(), place.world_size, life), daemon=True
        )
        keeper.start()
        return life
    # The question is new in each life, and so is its answer.
    question = uuid.uuid4().hex
    store.set(f"extractor/question/{place.rank}", question)
    begun = time.monotonic()
    while not store.check([f"extractor/answer/{question}"]):
        patience = FAREWELL_SECONDS if stopping() else WELCOME_SECONDS
        if time.monotonic() - begun > patience:
            raise RunError(f"rank 0 has not come in {patience:.0f} s")
        time.sleep(0.1)
    life = store.get(f"extractor/answer/{question}").decode()
    store.set(f"extractor/{life}/here/{place.rank}", "")
    return life


def _welcome(store: dist.Store, ranks: int, life: str) -> None:
    """Answer each rank's question until all are here; questions of ranks that died do no harm."""
    missing = set(range(1, ranks))
    with contextlib.suppress(dist.DistError):  # the watch speaks of it
        while missing:
            for rank in sorted(missing):
                if store.check([f"extractor/{life}/here/{rank}"]):
                    missing.discard(rank)
                elif store.check([f"extractor/question/{rank}"]):
                    question = store.get(f"extractor/question/{rank}").decode()
                    store.set(f"extractor/answer/{question}", life)
            time.sleep(0.1)
