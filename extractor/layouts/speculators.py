"""The layout of speculators' offline data (https://github.com/vllm-project/speculators,
speculators/train/data.py and hs_connectors/transfer.py of 0.9.0).

The output folder itself is a save_to_disk dataset. Beside it, hidden_states/hs_{i}.safetensors
belongs to row i of the dataset. Layers stand side by side in the order asked for. The last layer's own
state BEFORE the final norm follows, because the trainer applies the norm. With float8 there is one
scale per token for all layers together. The project's FP8Transfer reads scales, its plain
FileTransfer does not.
"""

import io
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import datasets
import numpy as np
import numpy.typing as npt
import torch
from datasets.arrow_writer import ArrowWriter

from extractor.errors import UsageError
from extractor.layouts import torchzip
from extractor.layouts.base import Loaded, Parts, check_ids, check_plane, split
from extractor.layouts.planes import FP8, Plane
from extractor.layouts.safetensors import Framed, map_sample, unscale
from extractor.prepared.vocab import TokenCounts, draft_vocabulary
from extractor.records import Sample
from extractor.states import FINAL, States

KEY, SCALES = "hidden_states", "hidden_states_scales"


@dataclass(frozen=True, kw_only=True)
class Speculators(Framed):
    """One safetensors file per sample of S tokens, with K layers and the last layer.

    It holds `token_ids` int64 [S] and `hidden_states` [S, K+1, H]. With float8 it also holds
    `hidden_states_scales` float32 [S, 1, 1]. The reader of speculators takes the mask from the
    dataset. The file has it too, as `loss_mask` uint8 [S], which that reader ignores, so that a file
    is complete without the dataset.
    """

    name = "speculators"
    ids = "token_ids"
    root = "hidden_states"
    suffix = ".safetensors"
    float8 = True
    reader = "speculators' ArrowDataset"

    @classmethod
    def stored_for(cls, asked: States) -> tuple[str, ...]:
        aux = tuple(name for name in asked.names if name != FINAL)
        if not aux:
            raise UsageError("--layout speculators needs at least one layer: give --layers")
        return (*aux, str(asked.num_layers - 1))

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        plane = Plane(KEY, self.stored, self.dtype, self.hidden * len(self.stored))
        if self.dtype != FP8:
            return (plane,)
        return (plane, Plane(SCALES, self.stored, torch.float32, 0, scale_of=KEY))

    def path(self, row: int, turn: int) -> str:
        assert self.numbering is not None
        return f"{self.root}/hs_{self.numbering.index(row, turn)}{self.suffix}"

    def shape(self, plane: Plane, tokens: int) -> tuple[int, ...]:
        return (tokens, len(self.stored), self.hidden) if plane.width else (tokens, 1, 1)

    def metadata(self, sample: Sample) -> dict[str, str]:
        return {"id": sample.id, "model": self.model}

    def load(self, path: Path, size: int | None = None) -> Loaded:
        file = map_sample(path, size)
        ids = file.tensor(self.ids)
        tokens = check_ids(path, ids)
        for plane in self.planes:
            check_plane(path, file.tensor(plane.key), plane, self.shape(plane, tokens))
        value = file.tensor(KEY)
        if value.dtype == FP8:
            value = unscale(value, file.tensor(SCALES), torch.float32)
        states = split(value.flatten(1), self.stored, self.hidden, path)
        return self.loaded(path, ids, file.tensor("loss_mask"), states)

    def is_sample(self, name: str) -> bool:
        return re.fullmatch(rf"{self.root}/hs_\d{{1,15}}{re.escape(self.suffix)}", name) is not None

    def vocabulary(self, counted: TokenCounts, size: int) -> dict[str, Parts]:
        """Files beside the dataset, where the trainer looks first.

        `d2t-{D}.npy` is int64 [D] and `t2d-{D}.npy` is bool [V]. `token_freq.pt` is a dict of id to
        count, from which the trainer can make a vocabulary of another size.
        """
        draft = draft_vocabulary(counted, size)
        used = counted.counts.nonzero()[0].tolist()
        frequencies = dict(zip(used, counted.counts[used].tolist(), strict=True))
        return {
            "token_freq.pt": torchzip.save(frequencies),
            f"d2t-{size}.npy": _npy(draft.d2t),
            f"t2d-{size}.npy": _npy(draft.t2d),
        }

    def finish(self, output: Path, samples: Iterable[Sample]) -> None:
        """Write the dataset, whose row i belongs to hs_{i}: `input_ids`, `loss_mask`, `seq_len`.

        Its files are renamed into place one by one. state.json is the last, because load_from_disk
        finds no dataset without it.
        """
        temporary = output / ".dataset.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        features = datasets.Features(
            {
                "input_ids": datasets.List(datasets.Value("int64")),
                "loss_mask": datasets.List(datasets.Value("int64")),
                "seq_len": datasets.Value("int64"),
            }
        )

        temporary.mkdir()
        table = temporary / "rows.arrow"
        with ArrowWriter(path=str(table), features=features) as writer:
            for sample in samples:
                row = {
                    "input_ids": sample.input_ids.numpy(),
                    "loss_mask": sample.loss_mask.numpy(),
                    "seq_len": len(sample),
                }
                writer.write(row)
            writer.finalize()
        bars = datasets.are_progress_bars_disabled()
        datasets.disable_progress_bars()
        try:
            data = datasets.Dataset.from_file(str(table))
            data.with_format("torch").save_to_disk(str(temporary / "data"))
        finally:
            if not bars:
                datasets.enable_progress_bars()
        files = sorted((temporary / "data").iterdir(), key=lambda file: file.name == "state.json")
        # Shards of an earlier dataset go first: their number may differ from that of the new ones.
        for stale in output.glob("data-*-of-*.arrow"):
            stale.unlink()
        for file in files:
            file.replace(output / file.name)
        shutil.rmtree(temporary)


def _npy(array: npt.NDArray[np.generic]) -> Parts:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    return [stream.getbuffer()]
