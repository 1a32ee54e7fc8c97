"""Numbers for the page, out of the journals, run.json, the prepared store and some of the files."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoTokenizer

from extractor.errors import UsageError
from extractor.output.folder import Folder
from extractor.output.journal import read_rejects
from extractor.output.run_json import Replica, Run
from extractor.records import Sample

Floats = npt.NDArray[np.float64]
MASKS_READ = 512
TOKENS_SHOWN = 320
SAMPLES_SHOWN = 4


@dataclass(frozen=True, slots=True)
class StateFacts:
    """One state over the tokens that were read.

    Attributes:
        name: "embed", a layer's number, "final".
        norms: Euclidean norm of each token, f64 [tokens].
        outliers: of each token, the largest magnitude over the root mean square, f64 [tokens].
    """

    name: str
    norms: Floats
    outliers: Floats


@dataclass(frozen=True, slots=True)
class Shown:
    """A sample with its tokens as text, and whether each is supervised."""

    title: str
    tokens: Sequence[tuple[str, bool]]
    left_out: int


@dataclass(frozen=True, slots=True)
class Rejected:
    """A line of rejects.jsonl."""

    source: str
    id: str
    reason: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the page says.

    Attributes:
        folder: the folder.
        run: its run.json.
        lengths: tokens of each sample, int64 [N].
        bytes: of each sample's file, int64 [N].
        supervised: share of supervised tokens of each sample whose mask was looked at, f64.
        supervised_tokens: of all samples, when every mask was looked at, else None.
        reasons: rejects by reason.
        rejects: the first few.
        states: statistics by state, in the model's order.
        tokens_read: how many tokens these are of.
        planes: name in the file to its bytes in all files together.
        replicas: of the last run that wrote, with their timelines.
        shown: samples to look at.
    """

    folder: Path
    run: Run
    lengths: npt.NDArray[np.int64]
    bytes: npt.NDArray[np.int64]
    supervised: Floats
    supervised_tokens: int | None
    reasons: Mapping[str, int]
    rejects: Sequence[Rejected]
    states: Sequence[StateFacts]
    tokens_read: int
    planes: Mapping[str, int]
    replicas: Sequence[Replica]
    shown: Sequence[Shown]

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def median(self) -> float:
        return float(np.median(self.lengths))


def gather(path: Path, states_of: int) -> Facts:
    """Raises UsageError for a folder that is not one of ours or holds no sample yet."""
    folder = Folder.open(path)
    if not folder.entries:
        raise UsageError(f"{path}: no sample is finished yet")
    lengths = np.array([entry.tokens for entry in folder.entries], np.int64)
    shares, supervised = _supervised(folder, lengths)
    states, read = _states(folder, spread(len(folder.entries), states_of))
    reasons, rejects = _rejects(path)
    return Facts(
        folder=path,
        run=folder.run,
        lengths=lengths,
        bytes=np.array([entry.size for entry in folder.entries], np.int64),
        supervised=shares,
        supervised_tokens=supervised,
        reasons=reasons,
        rejects=rejects,
        states=states,
        tokens_read=read,
        planes=_planes(folder, lengths),
        replicas=folder.run.last_work,
        shown=_shown(folder, lengths, SAMPLES_SHOWN),
    )


def spread(count: int, wanted: int) -> list[int]:
    """At most `wanted` of range(count), evenly spread, the first and the last among them."""
    if count <= wanted:
        return list(range(count))
    return sorted({round(i * (count - 1) / max(wanted - 1, 1)) for i in range(wanted)})


def _supervised(folder: Folder, lengths: npt.NDArray[np.int64]) -> tuple[Floats, int | None]:
    """Shares of samples, and the tokens of all of them: out of the prepared store when it is there,
    else of samples spread over the rows."""
    if (store := folder.store) is not None:
        written = {entry.key for entry in folder.entries}
        keys = zip(store.rows.tolist(), store.turns.tolist(), strict=True)
        kept = np.array([key in written for key in keys])
        _, mask = store.tokens()
        ends = store.lengths.cumsum(dtype=np.int64)
        counts = np.add.reduceat(mask, ends - store.lengths, dtype=np.int64)
        return counts[kept] / store.lengths[kept], int(counts[kept].sum())
    chosen = spread(len(folder.entries), MASKS_READ)
    counts = np.array([int(_sample(folder, i).loss_mask.sum()) for i in chosen])
    whole = len(chosen) == len(folder.entries)
    return counts / lengths[chosen], int(counts.sum()) if whole else None


def _sample(folder: Folder, index: int) -> Sample:
    return folder.load(folder.entries[index])[0]


def _states(folder: Folder, chosen: Sequence[int]) -> tuple[list[StateFacts], int]:
    norms: dict[str, list[torch.Tensor]] = {name: [] for name in folder.layout.captured}
    outliers: dict[str, list[torch.Tensor]] = {name: [] for name in folder.layout.captured}
    tokens = 0
    for index in chosen:
        _, states = folder.load(folder.entries[index])
        tokens += folder.entries[index].tokens
        for name in norms:
            wide = states[name].float()
            norm = wide.norm(dim=-1)
            rms = norm / wide.shape[-1] ** 0.5
            norms[name].append(norm)
            outliers[name].append(wide.abs().amax(dim=-1) / rms.clamp(min=1e-12))
    facts = [
        StateFacts(
            name,
            torch.cat(norms[name]).double().numpy(),
            torch.cat(outliers[name]).double().numpy(),
        )
        for name in sorted(norms, key=_depth)
    ]
    return facts, tokens


def _depth(name: str) -> int:
    return {"embed": -1, "final": 1 << 30}.get(name) if not name.isdigit() else int(name)  # pyright: ignore


def _rejects(path: Path, most: int = 8) -> tuple[dict[str, int], list[Rejected]]:
    reasons: Counter[str] = Counter()
    first: list[Rejected] = []
    for reject in read_rejects(path):
        reasons[reject.reason] += 1
        if len(first) < most:
            first.append(Rejected(reject.source, reject.id, reject.reason, reject.detail))
    return dict(reasons.most_common()), first


def _planes(folder: Folder, lengths: npt.NDArray[np.int64]) -> dict[str, int]:
    tokens = int(lengths.sum())
    planes = {plane.key: plane.row_bytes * tokens for plane in folder.layout.planes}
    rest = sum(entry.size for entry in folder.entries) - sum(planes.values())
    return {**planes, "ids, masks, headers": max(rest, 0)}


def _shown(folder: Folder, lengths: npt.NDArray[np.int64], count: int) -> list[Shown]:
    decode = _decoder(str(folder.run.model.path))
    by_length = np.argsort(lengths, kind="stable")
    chosen = dict.fromkeys(int(by_length[i]) for i in spread(len(lengths), count))
    shown: list[Shown] = []
    for index in chosen:
        sample = _sample(folder, index)
        pairs = zip(sample.input_ids.tolist(), sample.loss_mask.tolist(), strict=True)
        tokens = [(decode(token), bool(mask)) for token, mask in pairs]
        turn = f", turn {sample.turn}" if sample.turn else ""
        title = f"row {sample.row}{turn} · {sample.id} · {len(sample):,} tokens"
        shown.append(Shown(title, tokens[:TOKENS_SHOWN], max(len(tokens) - TOKENS_SHOWN, 0)))
    return shown


def _decoder(model: str) -> Any:
    """Token id to text; to the number itself where the model's tokenizer is not at hand."""
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(model, local_files_only=True)
    except Exception:  # of a damaged folder it raises nearly all there are
        return lambda token: f"{token} "
    return lambda token: tokenizer.decode([token])
