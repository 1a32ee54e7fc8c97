"""What a trainer imports: an output folder as a map-style Dataset, a collate, a sampler by length.

    from extractor.dataset import HiddenStates, LengthBatchSampler, Pad

    data = HiddenStates("OUT", {"aux": ("1", "14", "26"), "target": ("final",)})
    loader = DataLoader(
        data, batch_sampler=LengthBatchSampler(data.lengths, max_tokens=8192), collate_fn=Pad()
    )

Nothing here starts SGLang, and nothing is loaded before it is asked for: making a Dataset reads the
journals, reading an item maps one file, and a state that is not named is never read. It works on a
folder that is still being written: `refresh()` takes in what has been finished since.
"""

import mmap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, Sampler, get_worker_info

from extractor import pages
from extractor.errors import UsageError
from extractor.layouts.base import Damaged, sample_path
from extractor.layouts.safetensors import MappedSample, check_bytes, map_sample, state_of
from extractor.output import run_json
from extractor.output.folder import refuse_links
from extractor.output.journal import read_entries
from extractor.output.run_json import Run
from extractor.printable import printable
from extractor.records import IDS, LOGPROBS, Entry

PREFIX = "hidden_states."
HUGE = 32 << 20  # glibc keeps and reuses blocks up to this size (mallopt's M_MMAP_THRESHOLD)
Item = dict[str, Any]


class HiddenStates(Dataset[Item]):
    """Finished samples of an output folder, in row order.

    Args:
        output: the folder, in the native layout.
        states: which states and under what names. A sequence of names keeps them apart, as
            `hidden_states.{name}`; a mapping gives each key the states side by side in the last
            dimension, in the order given. Default: all that the folder has, apart.
        dtype: of the states handed out; default: as stored (float8 is unscaled to bfloat16).
        max_tokens: hand out no more than the first so many tokens of a sample.
        topk: hand out the top-k logits of a folder that has them.
        verify: read each file as a whole and compare its checksum with the journal's before its tensors
            are handed out. It costs the reading of all states, of those too that are not named.

    An item is a dict: `input_ids` int64 [T], `loss_mask` uint8 [T], each state [T, width],
    `topk_logprobs` float32 and `topk_ids` int32 [T, K] if there are any, and `index`, its position
    here. Nothing is shifted: row t of a state belongs to input_ids[t]. What
    needs no computing is a view of the mapped file; writing to it stays in this process.

    `run` is what run.json says, as a dictionary.

    Raises UsageError for a folder or a state that is not there, or one with links for folders inside;
    files may be links, as in a hub's cache. Making and reading it raise RunError for a file that cannot
    be read or is not as its journal line says.
    """

    def __init__(
        self,
        output: str | Path,
        states: Sequence[str] | Mapping[str, Sequence[str]] | None = None,
        *,
        dtype: torch.dtype | None = None,
        max_tokens: int | None = None,
        topk: bool = True,
        verify: bool = False,
    ) -> None:
        self.output = Path(output)
        run = _read_run(self.output)
        self.run = run_json.as_json(run)
        self.states = _choose(run.layers, states)
        self.dtype, self.max_tokens, self.verify = dtype, max_tokens, verify
        self.topk: int = run.topk_logits if topk else 0
        self._lines: dict[tuple[int, int], list[Entry]] = {}
        self._ends: dict[str, int] = {}
        self._rows: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._turns: npt.NDArray[np.int16] = np.zeros(0, np.int16)
        self._sizes: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._tokens: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self._at: dict[tuple[int, int], int] = {}
        self.refresh()

    def refresh(self) -> int:
        """Take in the samples finished since; returns how many are new. They come after those known
        already, so that an index keeps its meaning."""
        fresh: dict[tuple[int, int], tuple[int, int]] = {}
        for entry in read_entries(self.output, self._ends, follow=True, unreadable=_warn):
            if entry.reject is None:
                fresh[entry.key] = (entry.size, entry.tokens)
                if self.verify:
                    self._lines.setdefault(entry.key, []).append(entry)
        for key in [key for key in fresh if key in self._at]:  # written again after some damage
            at = self._at[key]
            self._sizes[at], self._tokens[at] = fresh.pop(key)
        ordered = sorted(fresh)
        begin = len(self._rows)
        self._at.update({key: begin + i for i, key in enumerate(ordered)})
        self._rows = np.append(self._rows, np.array([row for row, _ in ordered], np.int64))
        self._turns = np.append(self._turns, np.array([turn for _, turn in ordered], np.int16))
        self._sizes = np.append(self._sizes, np.array([fresh[k][0] for k in ordered], np.int64))
        self._tokens = np.append(self._tokens, np.array([fresh[k][1] for k in ordered], np.int32))
        return len(ordered)

    def __getstate__(self) -> dict[str, Any]:
        # A worker process never refreshes: arrays travel, the index by row does not.
        return {**self.__dict__, "_at": {}}

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        shown = ", ".join(f"{key}={'+'.join(names)}" for key, names in self.states.items())
        return f"HiddenStates({self.output}: {len(self)} samples, {self.tokens} tokens; {shown})"

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Tokens of each item as handed out, int32 [N]."""
        return self._tokens if self.max_tokens is None else self._tokens.clip(max=self.max_tokens)

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """The input row of each item, int64 [N]."""
        return self._rows

    @property
    def turns(self) -> npt.NDArray[np.int16]:
        """The turn of each item, 0 for a whole conversation, int16 [N]."""
        return self._turns

    def path(self, index: int) -> Path:
        return self.output / sample_path(int(self._rows[index]), int(self._turns[index]))

    def __getitem__(self, index: int) -> Item:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} of {len(self)} samples")
        index %= len(self)
        sample = self._sample(index)
        keep = slice(self.max_tokens)
        item: Item = {name: sample.tensor(name)[keep] for name in ("input_ids", "loss_mask")}
        for key, names in self.states.items():
            parts = [state_of(sample, PREFIX + name, self.dtype)[keep] for name in names]
            item[key] = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        item |= {key: sample.tensor(key)[keep] for key in (LOGPROBS, IDS) if self.topk}
        item["index"] = index
        return item

    def _sample(self, index: int) -> MappedSample:
        """Its file, mapped, with as many tokens everywhere as the journal says. Raises RunError."""
        path = self.path(index)
        if self.verify:
            key = int(self._rows[index]), int(self._turns[index])
            check_bytes(path, self._lines[key][::-1], follow=True)
        sample = map_sample(path, None if self.verify else int(self._sizes[index]), follow=True)
        names = ["input_ids", "loss_mask", *(LOGPROBS, IDS)[: 2 * bool(self.topk)]]
        names += [f"{PREFIX}{name}" for names in self.states.values() for name in names]
        tokens = int(self._tokens[index])
        for name in names:
            shape = tuple(sample.tensor(name).shape)
            if shape[:1] != (tokens,):
                what = f"{name} is {list(shape)}, and the journal says {tokens:,} tokens"
                raise Damaged(path, what)
        return sample


def _read_run(output: Path) -> Run:
    refuse_links(output)
    run = run_json.find(output, follow=True)
    if run.layout != "native":
        raise UsageError(
            f"{output} is in the layout of {printable(run.layout)}: read it with that project, or "
            f"turn it back with: extractor convert {output} NEW --layout native"
        )
    return run


def _warn(journal: Path, at: int) -> None:
    text = f"{journal}: no journal line at byte {at:,}; a sample that it spoke of is left out"
    warnings.warn(printable(text), stacklevel=4)


def _choose(
    stored: tuple[str, ...], states: Sequence[str] | Mapping[str, Sequence[str]] | None
) -> dict[str, tuple[str, ...]]:
    if isinstance(states, str):
        raise UsageError(f"states {states!r}: wanted a sequence of names, such as ({states!r},)")
    if states is None:
        states = stored
    if isinstance(states, Mapping):
        chosen = {key: tuple(map(str, names)) for key, names in states.items()}
    else:
        chosen = {f"{PREFIX}{name}": (str(name),) for name in states}
    for names in chosen.values():
        for name in names:
            if name not in stored:
                raise UsageError(f"state {name} is not in the folder; it has {', '.join(stored)}")
    return chosen


class Pad:
    """Collates items to the longest of them, or to a multiple.

    A batch is a dict of [B, L, ...] tensors under the items' own names, zeros (for `input_ids`
    pad_id) past each sample's end, with `attention_mask` int64 [B, L], `lengths` int64 [B] and
    `index` int64 [B]; loss_mask is 0 on padding.

    Args:
        pad_id: the id that fills `input_ids`.
        multiple_of: round L up to a multiple of this.
    """

    def __init__(self, pad_id: int = 0, multiple_of: int = 1) -> None:
        self.pad_id, self.multiple_of = pad_id, multiple_of

    def __call__(self, items: Sequence[Item]) -> dict[str, torch.Tensor]:
        lengths = torch.tensor([len(item["input_ids"]) for item in items])
        width = -(-int(lengths.max()) // self.multiple_of) * self.multiple_of
        batch: dict[str, torch.Tensor] = {}
        for key, first in items[0].items():
            if not isinstance(first, torch.Tensor):
                batch[key] = torch.tensor([item[key] for item in items])
                continue
            padded = _empty((len(items), width, *first.shape[1:]), first.dtype)
            for row, item in zip(padded, items, strict=True):
                row[: len(item[key])] = item[key]
                row[len(item[key]) :] = self.pad_id if key == "input_ids" else 0
            batch[key] = padded
        batch["attention_mask"] = (torch.arange(width) < lengths.unsqueeze(1)).long()
        batch["lengths"] = lengths
        return batch


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory to fill, its content undefined.

    In a DataLoader's worker it is shared memory, as torch's own default_collate takes, for else the
    batch would be copied once more on its way to the trainer. What is larger than the allocator ever
    hands out twice is asked for in huge pages: to fill fresh pages of 4 KiB takes three times as long
    as the copy itself."""
    nbytes = int(np.prod(shape)) * dtype.itemsize
    if get_worker_info() is not None:
        storage = torch.UntypedStorage._new_shared(nbytes)  # pyright: ignore
        return torch.empty(0, dtype=dtype).set_(storage, 0, shape)  # pyright: ignore
    if nbytes < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(pages.anonymous(nbytes), dtype=dtype).view(shape)


class LengthBatchSampler(Sampler[list[int]]):
    """Batches of samples of like length, so that little of a batch is padding.

    Samples are shuffled, sorted by length within pools of about fifty batches, cut into batches, and
    the batches shuffled. The same seed and epoch give the same batches.

    Args:
        lengths: tokens of each sample, such as HiddenStates.lengths.
        batch_size: samples of a batch; or
        max_tokens: tokens of a batch, padding counted; a longer sample is a batch of its own.
        shuffle: with False, batches come in order of length, longest first: the first step then
            shows whether memory is enough.
        seed: of the shuffling; call set_epoch before each epoch (accelerate does).
        drop_last: leave out a last batch of fewer than batch_size samples.
    """

    POOL = 50

    def __init__(
        self,
        lengths: npt.ArrayLike,
        *,
        batch_size: int | None = None,
        max_tokens: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if (batch_size is None) == (max_tokens is None):
            raise ValueError("give batch_size or max_tokens, one of them")
        self.lengths = np.asarray(lengths)
        # Under these names accelerate looks for them when it shares batches among processes.
        self.batch_size, self.drop_last = batch_size, drop_last
        self.max_tokens, self.shuffle, self.seed, self.epoch = max_tokens, shuffle, seed, 0
        self._made: tuple[int, list[list[int]]] | None = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._batches())

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches())

    def _batches(self) -> list[list[int]]:
        if self._made is None or self._made[0] != self.epoch:
            self._made = (self.epoch, self._make())
        return self._made[1]

    def _make(self) -> list[list[int]]:
        rng = np.random.default_rng((self.seed, self.epoch))
        count = len(self.lengths)
        order = rng.permutation(count) if self.shuffle else np.arange(count)
        size = self.batch_size or max(int(self.max_tokens or 0) // max(self._mean(), 1), 1)
        pool = size * self.POOL if self.shuffle else max(count, 1)
        batches: list[list[int]] = []
        for begin in range(0, count, pool):
            part = order[begin : begin + pool]
            batches.extend(self._cut(part[np.argsort(-self.lengths[part], kind="stable")]))
        if self.drop_last and self.batch_size:
            batches = [batch for batch in batches if len(batch) == self.batch_size]
        if self.shuffle:
            batches = [batches[i] for i in rng.permutation(len(batches))]
        return batches

    def _mean(self) -> int:
        return int(self.lengths.mean()) if len(self.lengths) else 1

    def _cut(self, longest_first: npt.NDArray[np.int64]) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in longest_first.tolist():
            full = len(batch) == self.batch_size
            if batch and self.max_tokens is not None:  # the first is the longest: it sets the width
                full = int(self.lengths[batch[0]]) * (len(batch) + 1) > self.max_tokens
            if full:
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch
