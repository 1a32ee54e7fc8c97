"""run.json: reading it, writing it, and saying in it how a run ended."""

import datetime
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from extractor.errors import UsageError
from extractor.files import write_json
from extractor.layouts.planes import DTYPES
from extractor.printable import printable
from extractor.regular import cannot_read, read_regular
from extractor.strict import builtins, decode

RUN = "run.json"
SCHEMA = 1
MOST_EARLIER = 50
MOST_BYTES = 256 << 20
_NAME = re.compile(r"run(?:-(?P<index>\d{1,9})-of-(?P<count>\d{1,9}))?\.json")
_STATE = re.compile(r"embed|final|\d{1,6}")
_PREPARED = re.compile(r"prepared/[0-9A-Za-z][0-9A-Za-z._-]*")
WHEN = "%Y-%m-%dT%H:%M:%S%z"
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Seconds = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]  # a clock may step back
Amount = Annotated[float, msgspec.Meta(ge=-1e30, le=1e30)]
Point = tuple[Seconds, Amount, Amount, Seconds, Seconds, Seconds]  # progress.Timeline.FIELDS
Dimension = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]


class RunModel(msgspec.Struct, frozen=True, kw_only=True):
    """The model of a run.

    Attributes:
        path: local folder.
        num_layers, hidden_size, vocab_size: of its config; 0 where a run did not say.
    """

    path: str = ""
    architecture: str = ""
    num_layers: Dimension = 0
    hidden_size: Dimension = 0
    vocab_size: Count = 0


class World(msgspec.Struct, frozen=True, kw_only=True):
    """ranks = replicas * tp."""

    ranks: Count
    tp: Count
    replicas: Count


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Where convert read a folder from."""

    folder: str
    layout: str


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica said of its work, as far as other parts of the program read it.

    Attributes:
        seconds: of its run.
        tokens: that it wrote.
        timeline: progress.Timeline's points, [points, 6].
    """

    seconds: Seconds = 0.0
    tokens: Count = 0
    timeline: tuple[Point, ...] = ()


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What a run says of itself. A field that a run did not get to say has its default, and is left
    out of the file when that is None.

    Attributes:
        schema: of this file.
        status: running, complete, stopped or failed.
        fingerprint: of `parts`; "" for a run that ended before it knew them.
        parts: what stored numbers depend on, by name.
        run_id: of the process that wrote it, so that it knows its own record from an earlier run's.
        config, argv: how it was started.
        layers: the states of a file, in its order.
        dtype, layout, topk_logits: of the files.
        prepared: the prepared store, relative to the output folder; None for a folder of convert's.
        device, world, versions, git_commit, engine: what it ran on.
        started, finished: local times with their offset, to the second.
        started_from: finished samples that it found.
        data, counts: of rows and samples.
        stages: seconds by name.
        self_check, layer_proof: what was proved before the first batch.
        replicas: a dictionary of each replica; `Replica` is the part that is read again.
        error: why it failed.
        converted_from: of a folder that convert wrote.
        earlier: records of the runs before this one, oldest first, without those of their own. At most
            50: the first one and the latest. Of their timelines the latest is kept.
        earlier_dropped: how many more there were.
    """

    schema: int = SCHEMA
    status: str = "running"
    fingerprint: str
    parts: dict[str, str] = {}
    run_id: str | None = None
    config: dict[str, Any] | None = None
    argv: tuple[str, ...] | None = None
    layers: tuple[str, ...] = ()
    dtype: str = ""
    layout: str = "native"
    topk_logits: Dimension = 0
    model: RunModel = RunModel()
    prepared: str | None = None
    world: World | None = None
    device: str | None = None
    versions: dict[str, str] | None = None
    git_commit: str | None = None
    started: str | None = None
    data: dict[str, Count] | None = None
    started_from: Count | None = None
    finished: str | None = None
    counts: dict[str, Count] | None = None
    stages: dict[str, Seconds] | None = None
    self_check: dict[str, Any] | None = None
    layer_proof: dict[str, Any] | None = None
    engine: dict[str, Any] | None = None
    replicas: tuple[dict[str, Any], ...] | None = None
    error: str | None = None
    converted_from: Origin | None = None
    earlier: tuple[dict[str, Any], ...] | None = None
    earlier_dropped: Count | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for values that no run of this program writes."""
        if self.schema != SCHEMA:
            raise ValueError(f"schema {self.schema}, and this program reads schema {SCHEMA}")
        if self.dtype and self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r}; wanted one of {', '.join(DTYPES)}")
        for name in self.layers:
            if not _STATE.fullmatch(name):
                raise ValueError(f"layers has {name!r}; wanted a number, embed or final")
        if self.prepared is not None and not _PREPARED.fullmatch(self.prepared):
            raise ValueError(f"prepared {self.prepared!r}; wanted prepared/NAME")
        if self.layers and not (self.dtype and self.model.hidden_size and self.model.num_layers):
            raise ValueError("names layers, but not the dtype, num_layers and hidden_size of them")
        _ = self.last_work

    @property
    def began_to_write(self) -> bool:
        """Whether it knew what a file holds."""
        return bool(self.fingerprint and self.layers)

    @property
    def last_work(self) -> tuple[Replica, ...]:
        """What the replicas did of the last run that wrote anything, this one or an earlier."""
        records = ({"replicas": self.replicas}, *reversed(self.earlier or ()))
        told = next((r["replicas"] for r in records if r.get("replicas")), ())
        return msgspec.convert(told, tuple[Replica, ...])

    def of_folder(self) -> "Run":
        """Of this record, what is true of its folder whoever writes there next."""
        return Run(
            fingerprint=self.fingerprint,
            parts=self.parts,
            config=self.config,
            layers=self.layers,
            dtype=self.dtype,
            layout=self.layout,
            topk_logits=self.topk_logits,
            model=self.model,
            prepared=self.prepared,
            data=self.data,
            converted_from=self.converted_from,
        )

    def after(self, before: "Run | None") -> "Run":
        """This record, with what an earlier one of the same file said of itself, and it of those
        before it, under `earlier`."""
        if before is None or (self.run_id is not None and before.run_id == self.run_id):
            return self
        older = list(before.earlier or ())
        if before.replicas:
            older = [_without_timelines(record) for record in older]
        records = [*older, _without_earlier(before)]
        dropped = max(len(records) - MOST_EARLIER, 0)
        kept = (records[0], *records[1 + dropped :])
        total = dropped + (before.earlier_dropped or 0)
        return replace(self, earlier=kept, earlier_dropped=total or None)


def replace(run: Run, **changes: Any) -> Run:
    """A copy with other values of some fields."""
    return msgspec.structs.replace(run, **changes)


def _without_earlier(run: Run) -> dict[str, Any]:
    value = as_json(run)
    value.pop("earlier", None)
    value.pop("earlier_dropped", None)
    return value


def _without_timelines(record: Mapping[str, Any]) -> dict[str, Any]:
    replicas = record.get("replicas")
    if not isinstance(replicas, list | tuple):
        return dict(record)
    kept = [
        {key: value for key, value in replica.items() if key != "timeline"}
        for replica in replicas
        if isinstance(replica, dict)
    ]
    return {**record, "replicas": kept}


def name_of(index: int, count: int) -> str:
    """The file of job `index` of `count`."""
    return RUN if count == 1 else f"run-{index}-of-{count}.json"


def is_name(name: str) -> bool:
    """Whether a file of this name is a record of a run."""
    return _NAME.fullmatch(name) is not None


def paths(output: Path) -> list[Path]:
    """Those of a folder, in order of their names; none where there is no folder."""
    try:
        return sorted(path for path in output.iterdir() if is_name(path.name))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise cannot_read(output, error) from error


def read(path: Path, *, follow: bool = False) -> Run | None:
    """A record, or None when there is none. follow: let it be a link.

    Raises UsageError when it is not one, and RunError when it cannot be read."""
    try:
        return decode(read_regular(path, follow=follow, most=MOST_BYTES), Run)
    except FileNotFoundError:
        return None
    except ValueError as error:
        text = printable(f"{path}: is not a {RUN} of this program: {error}")
        raise UsageError(text) from error


def newest(output: Path, *, follow: bool = False) -> Run | None:
    """The record that answers for a folder, or None while no run has known its fingerprint there.

    It is that of the run that started last: an older one may be of other shard counts, of a model that
    has moved, or of settings that the folder no longer has. Of those that started in the same second
    run.json comes first, then the file that was written last.

    Raises UsageError or RunError when any of them is damaged: it might be the one."""
    found = [(path, read(path, follow=follow)) for path in paths(output)]
    known = [(path, run) for path, run in found if run is not None and run.fingerprint]
    if not known:
        return None
    return max(known, key=lambda item: (_when(item[1]), item[0].name == RUN, _written(item[0])))[1]


def find(output: Path, *, follow: bool = False) -> Run:
    """The record of a folder that has samples, or is about to.

    Raises UsageError for anything else: no folder, no record, or that of a run that stopped before it
    had anything to write; RunError when a record cannot be read."""
    if not output.is_dir():
        raise UsageError(f"{printable(str(output))}: is no folder")
    run = newest(output, follow=follow)
    if run is None and not paths(output):
        raise UsageError(
            f"{printable(str(output))}: has no {RUN}, so it is not a folder that extract wrote"
        )
    if run is None or not run.began_to_write:
        raise UsageError(
            f"{printable(str(output))}: its run stopped before it had anything to write"
        )
    return run


def _when(run: Run) -> float:
    try:
        return datetime.datetime.strptime(run.started or "", WHEN).timestamp()
    except (ValueError, OverflowError):
        return float("-inf")


def _written(path: Path) -> int:
    try:
        return path.lstat().st_mtime_ns
    except OSError:
        return 0


def as_json(run: Run) -> dict[str, Any]:
    """A record as its file has it: what the run did not get to say is left out."""
    value = builtins(run)
    return {key: item for key, item in value.items() if item is not None or key == "self_check"}


def write(path: Path, run: Run) -> None:
    """Write it whole, on disk before it has its name. Raises OSError with the path."""
    write_json(path, as_json(run))
