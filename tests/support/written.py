"""Output folders as a run leaves them, in a fraction of a second: the real stager, writer and journal,
fed with random states instead of a model's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from extractor.files import Durability
from extractor.layouts import LAYOUTS, Layout, Numbering
from extractor.output import run_json
from extractor.output.journal import JOURNAL, Journal
from extractor.output.run_json import Run, RunModel
from extractor.prepared.pieces import Piece, Refusal
from extractor.prepared.store import Identity, StoreWriter
from extractor.records import IDS, LOGPROBS, Batch, CapturedBatch, Sample
from extractor.states import States
from extractor.write.buffers import HostRing
from extractor.write.staging import Stager
from extractor.write.writer import Writer

NUM_LAYERS, HIDDEN = 6, 32
LENGTHS = (7, 1, 30, 12, 5, 18, 9)


@dataclass(frozen=True)
class Truth:
    """What was written, to compare with: a sample, and its states [T, H] as the model gave them."""

    sample: Sample
    states: Mapping[str, torch.Tensor]


def make_samples(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[Sample]:
    """Rows 0, 2, 3, ...: row 1 was rejected in preparation, as rows are. The last row has two turns."""
    generator = torch.Generator().manual_seed(seed)
    samples: list[Sample] = []
    for i, length in enumerate(lengths):
        last = i >= len(lengths) - 2
        row = len(lengths) - 1 if last else i + (i > 0)
        samples.append(
            Sample(
                row=row,
                turn=i - len(lengths) + 3 if last else 0,
                id=f"../row {row} \u00e9",
                source=f"rows.jsonl:{row + 1}",
                input_ids=torch.randint(0, 1000, (length,), generator=generator),
                loss_mask=(torch.arange(length) >= length // 3).to(torch.uint8),
            )
        )
    return samples


def make_states(
    names: Sequence[str], tokens: int, hidden: int = HIDDEN, dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    """Random, with a row of zeros and an outlier, which real states have."""
    states: dict[str, torch.Tensor] = {}
    for i, name in enumerate(names):
        generator = torch.Generator().manual_seed(1000 * i + tokens)
        state = torch.randn(tokens, hidden, generator=generator) * (i + 1)
        state[0] *= 500
        state[-1] = 0
        states[name] = state.to(dtype)
    return states


def make_topk(tokens: int, k: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return {
        LOGPROBS: -torch.rand(tokens, k, generator=generator),
        IDS: torch.randint(0, 1000, (tokens, k), generator=generator, dtype=torch.int32),
    }


def make_layout(
    name: str = "native",
    asked: str = "1,3,4",
    final: bool = True,
    *,
    hidden: int = HIDDEN,
    dtype: torch.dtype = torch.bfloat16,
    samples: Sequence[Sample],
    topk: int = 0,
) -> Layout:
    rows = np.array([sample.row for sample in samples], np.int64)
    turns = np.array([sample.turn for sample in samples], np.int16)
    return LAYOUTS[name](
        stored=LAYOUTS[name].stored_for(States.resolve(asked, final, NUM_LAYERS)),
        hidden=hidden,
        dtype=dtype,
        model="tiny",
        numbering=Numbering(rows, turns),
        topk=topk,
    )


def write_prepared(output: Path, samples: Sequence[Sample]) -> str:
    """The prepared store that these samples came from; its path relative to output."""
    name = f"prepared/{'0' * 16}"
    (output / name).mkdir(parents=True)
    writer = StoreWriter(output / name)
    for sample in samples:
        file, _, line = sample.source.rpartition(":")
        ids, mask = sample.input_ids.numpy().astype(np.int32), sample.loss_mask.numpy()
        writer.add(Piece(sample.row, sample.turn, sample.id, file, int(line), ids, mask, False))
    writer.refuse(Refusal(1, 0, "row 1", "rows.jsonl", 2, "not_json", "a \u2028 line"))
    inputs = [{"path": "/rows.jsonl", "size": 9, "mtime": 1, "ctime": 1, "inode": 1}]
    inputs = [{**inputs[0], "digest": "0" * 32, "newlines": 9}]
    rows = max(sample.row for sample in samples) + 1
    writer.close(rows, Identity("0" * 32, {"rules": "1"}, "/models/tiny", inputs))
    return name


def write_folder(
    output: Path,
    layout: Layout,
    samples: Sequence[Sample],
    *,
    journal: str = "0000",
    model_dtype: torch.dtype = torch.bfloat16,
    batch: int = 3,
    durability: Durability = "none",
    processes: bool = False,
    prepared: bool = False,
) -> list[Truth]:
    """Write samples and what a run writes beside them; call again to let the folder grow."""
    ring = HostRing(1 << 20, 2, pinned=False, shared=processes)
    lines = Journal(output / JOURNAL / f"{journal}.jsonl", sync=durability != "none")
    writer = Writer(
        output,
        lines,
        ring,
        layout=layout,
        threads=2,
        processes=processes,
        durability=durability,
    )
    stager = Stager(layout.planes, torch.device("cpu"))
    truths: list[Truth] = []
    for number, begin in enumerate(range(0, len(samples), batch)):
        part = Batch.of(number, tuple(samples[begin : begin + batch]))
        per_sample = [
            make_states(layout.captured, len(s), layout.hidden, model_dtype) for s in part.samples
        ]
        truths += [Truth(s, states) for s, states in zip(part.samples, per_sample, strict=True)]
        joined = {
            name: torch.cat([states[name] for states in per_sample]) for name in layout.captured
        }
        if layout.topk:
            joined |= make_topk(part.num_tokens, layout.topk)
        buffer = ring.acquire(stager.nbytes(part.num_tokens), writer.check)
        writer.submit(stager.stage(CapturedBatch(part, joined), buffer))
    writer.close()
    lines.close()
    ring.close()
    dtype = str(layout.dtype).removeprefix("torch.")
    run = Run(
        status="complete",
        fingerprint="0",
        parts={"layers": ",".join(layout.stored), "layout": layout.name, "dtype": dtype},
        layers=layout.stored,
        dtype=dtype,
        layout=layout.name,
        prepared=write_prepared(output, samples) if prepared else None,
        topk_logits=layout.topk,
        model=RunModel(path="/models/tiny", num_layers=NUM_LAYERS, hidden_size=layout.hidden),
    )
    run_json.write(output / run_json.RUN, run)
    layout.finish(output, (sample for sample in samples))
    return truths
