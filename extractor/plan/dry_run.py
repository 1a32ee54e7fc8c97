"""`--dry-run`: what a run would do and need, without a GPU.

Rows are read and tokenized as in a run, so that the counts of tokens and rejects are exact; the run uses
the prepared samples again. The size of a file is measured on files that the layout makes from zeros.
Memory is an estimate; weights are counted on a model without storage (accelerate's init_empty_weights).
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM

from extractor.config import ExtractConfig
from extractor.errors import EXIT_FAILED, EXIT_OK, UsageError
from extractor.layouts import LAYOUTS, Layout
from extractor.layouts.planes import DTYPES, Blob
from extractor.model import ModelSpec
from extractor.output.folder import check_output
from extractor.plan import budget as budgets
from extractor.plan.batches import Plan
from extractor.plan.budget import Needs, Room
from extractor.plan.request import Wanted
from extractor.plan.todo import Todo, part_of
from extractor.prepared.store import PreparedStore
from extractor.prepared.vocab import FREQUENCIES, VOCAB, TokenCounts, draft_vocabulary, vocab_files
from extractor.progress import duration, size
from extractor.records import Sample

BLOCK = 4096
"""Bytes per block: on most filesystems a file takes a whole number of blocks of this size."""

JOURNAL_LINE = 110
PROBE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a run would do. Bytes on disk are exact to a fraction of a percent; memory is an estimate.

    Attributes:
        rows, samples, rejected, reasons: counts of the preparation; reasons maps a code to a count.
        tokens, supervised, longest: of all samples, in tokens.
        shard, shard_samples: this job's part, and its samples.
        left_samples, left_tokens: what of this part is not written yet.
        batches, batch_tokens, fill: of what is left; fill is the mean share of batch_tokens that a batch
            uses, 0 to 1.
        model: a line that describes the model.
        stored, layout, dtype: what a file holds.
        disk: bytes that the files left to write take in whole blocks, with vocab/ if it is not written
            yet.
        choices: the same for each layout and dtype: "layout dtype" to bytes.
        free: free bytes of the filesystem of the output folder.
        device: what one GPU needs; device_free: the least free bytes of any GPU, or None without one.
        host: the most bytes of host memory that all writers of this machine take, with the model on a
            CPU; host_free: the free bytes.
        writers: how many replicas write from this machine: one, unless torchrun starts more ranks.
        tp: how many ranks hold one copy of the model together.
        seconds: the time at the rate of --tokens-per-second, or None without it.
    """

    rows: int
    samples: int
    rejected: int
    reasons: Mapping[str, int]
    tokens: int
    supervised: int
    longest: int
    shard: str
    shard_samples: int
    left_samples: int
    left_tokens: int
    batches: int
    batch_tokens: int
    fill: float
    model: str
    stored: Sequence[str]
    layout: str
    dtype: str
    disk: int
    choices: Mapping[str, int]
    free: int
    device: Needs
    device_free: int | None
    host: int
    host_free: int
    writers: int
    tp: int
    seconds: float | None

    @property
    def problems(self) -> list[str]:
        found: list[str] = []
        if self.disk > self.free:
            found.append(f"the disk lacks {size(self.disk - self.free)}")
        if self.device_free is not None and self.device.total > self.device_free:
            found.append(
                f"a GPU lacks {size(self.device.total - self.device_free)}: use a larger --tp"
            )
        if self.host > self.host_free:
            found.append(
                f"host memory lacks {size(self.host - self.host_free)}: use a smaller --host-memory"
            )
        return found


def dry_run(config: ExtractConfig) -> int:
    """Print the estimate on rank 0. Returns exit code 0, or 1 when disk or memory is too small.

    Raises UsageError for a request that extract itself would refuse."""
    if int(os.environ.get("RANK", "0")):
        return EXIT_OK
    estimate = make_estimate(config)
    if config.json:
        values = {**asdict(estimate), "problems": estimate.problems}
        print(json.dumps(values, indent=1))  # noqa: T201
    else:
        print(table(estimate))  # noqa: T201
    return EXIT_FAILED if estimate.problems else EXIT_OK


def make_estimate(config: ExtractConfig) -> Estimate:
    """Prepare the rows and estimate the run. Raises UsageError for a request that cannot be met."""
    wanted = Wanted.of(config)
    spec, dtype = wanted.spec, wanted.dtype
    check_output(config.output)
    store = wanted.prepare(quiet=config.json)
    layout = wanted.layout(store)
    selected = part_of(config, store)
    todo = Todo.of(config.output, store, layout, selected)
    beside = vocab_bytes(config, spec, store, layout)
    lengths = todo.lengths
    tp = config.tp or int(os.environ.get("WORLD_SIZE", "1"))
    device = "cpu" if config.device == "cpu" else "cuda"
    ask = todo.ask(wanted, device, tp)
    device_free, host_free = _device_free(device), budgets.available_host_bytes()
    writers = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")) // tp, 1)
    budget = budgets.sizes(ask, Room(device=device_free, host=host_free, writers=writers))
    batch_tokens = budget.max_tokens
    batches = todo.batches(budget)
    need = budgets.needs(ask, batch_tokens)
    summary = store.summary()
    tokens = int(lengths.sum(dtype=np.int64))
    rate = config.tokens_per_second
    return Estimate(
        rows=store.num_rows,
        samples=len(store),
        rejected=len(store.rejects),
        reasons={
            key.partition(".")[2]: value
            for key, value in summary.items()
            if key.startswith("rejected.")
        },
        tokens=summary["tokens"],
        supervised=summary["supervised"],
        longest=int(store.lengths.max()) if len(store) else 0,
        shard=config.shard,
        shard_samples=len(selected),
        left_samples=len(todo.left),
        left_tokens=tokens,
        batches=len(batches),
        batch_tokens=batch_tokens,
        fill=_fill(batches, store, batch_tokens),
        model=f"{spec.path.name}, {spec.architecture}, {spec.num_layers} layers of "
        f"{spec.hidden_size:,}",
        stored=layout.stored,
        layout=layout.name,
        dtype=dtype,
        disk=disk_bytes(layout, lengths) + beside,
        choices={key: value + beside for key, value in _choices(wanted, store, lengths).items()},
        free=free_bytes(config.output),
        device=Needs(**{**asdict(need), "weights": weight_bytes(config, spec) // tp}),
        device_free=device_free,
        host=budgets.host_need(budget, ask, writers),
        host_free=host_free,
        writers=writers,
        tp=tp,
        seconds=None if rate is None else tokens / rate,
    )


def _fill(batches: Plan, store: PreparedStore, batch_tokens: int) -> float:
    if not len(batches):
        return 1.0
    return float(batches.tokens(store.lengths).clip(max=batch_tokens).mean() / batch_tokens)


def _choices(wanted: Wanted, store: PreparedStore, lengths: np.ndarray) -> dict[str, int]:
    """Bytes on disk in each layout that can store these states, in the dtype asked for and in float8."""
    choices: dict[str, int] = {}
    for name in LAYOUTS:
        for kind in dict.fromkeys((wanted.dtype, "float8_e4m3fn")):
            try:
                choices[f"{name} {kind}"] = disk_bytes(
                    wanted.other_layout(name, kind, store), lengths
                )
            except (
                UsageError
            ):  # this layout knows no float8 or no logits, or needs a layer that was not asked for
                continue
    return choices


def disk_bytes(layout: Layout, lengths: np.ndarray) -> int:
    """Bytes that files of these lengths (in tokens, [samples]) take on disk, with their journal lines.

    The size of a file is linear in its tokens, so it is measured at two lengths."""
    # Two files give the bytes per token and the bytes that every file has; then whole blocks count.
    one, many = (_file_bytes(layout, tokens) for tokens in (1, 1 + PROBE))
    per_token = (many - one) / PROBE
    sizes = one + per_token * (lengths.astype(np.float64) - 1)
    blocks = np.ceil(sizes / BLOCK) * BLOCK
    return int(blocks.sum()) + JOURNAL_LINE * len(lengths)


def vocab_bytes(
    config: ExtractConfig, spec: ModelSpec, store: PreparedStore, layout: Layout
) -> int:
    """Bytes that vocab/ and the layout's own vocabulary files take; 0 when vocab/ is there already."""
    if (config.output / VOCAB / FREQUENCIES).exists():
        return 0
    if not (size := config.draft_vocab_size):
        files = vocab_files(TokenCounts.of_samples((), spec.vocab_size), None)
    else:
        counted = TokenCounts.of(store, spec.vocab_size)
        files = vocab_files(counted, draft_vocabulary(counted, size))
        files |= layout.vocabulary(counted, size)
    return sum(-(-sum(map(len, parts)) // BLOCK) * BLOCK for parts in files.values())


def _file_bytes(layout: Layout, tokens: int) -> int:
    """The size in bytes of a file of so many tokens; it is made from zeros in memory."""
    assert layout.numbering is not None
    first = len(layout.numbering.rows) > 0
    sample = Sample(
        row=int(layout.numbering.rows[-1]) if first else 0,
        turn=0,
        id="0" * 20,
        source="",
        input_ids=torch.zeros(tokens, dtype=torch.int64),
        loss_mask=torch.zeros(tokens, dtype=torch.uint8),
    )
    tensors = {
        plane.key: Blob.of(torch.zeros(plane.shape(tokens), dtype=plane.dtype))
        for plane in layout.planes
    }
    return sum(map(len, layout.parts(sample, tensors)))


def free_bytes(output: Path) -> int:
    """Free bytes where the output folder is, or is going to be."""
    place = output
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def weight_bytes(config: ExtractConfig, spec: ModelSpec) -> int:
    """Bytes of the weights in memory, counted on a model without storage.

    When transformers cannot build the model, or when it is quantized, the size of the weight files is
    returned instead."""
    try:
        shape = AutoConfig.from_pretrained(
            spec.path, trust_remote_code=config.trust_remote_code, local_files_only=True
        )
        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(
                shape, trust_remote_code=config.trust_remote_code
            )
        model.tie_weights()  # so that a head that is the embedding is counted once
    except Exception:  # each model class checks its config in its own way and may raise any error
        return spec.weight_bytes
    if getattr(shape, "quantization_config", None) is not None:
        return spec.weight_bytes  # the parameters of the plain model would take more bytes
    itemsize = DTYPES[spec.dtype].itemsize if spec.dtype in DTYPES else 2
    return sum(parameter.numel() for parameter in model.parameters()) * itemsize


def _device_free(device: str) -> int | None:
    if device == "cpu" or not torch.cuda.is_available():
        return None
    return min(torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count()))


# For a person -------------------------------------------------------------------------------------
def table(e: Estimate) -> str:
    """The estimate as text for a person, about 80 columns wide."""
    lines = [
        _line("model", e.model),
        _line("states", f"{', '.join(e.stored)} as {e.dtype}, layout {e.layout}"),
        _line(
            "rows",
            f"{e.rows:,} read; {e.samples:,} samples, {e.rejected:,} rejected"
            + "".join(f", {count:,} {reason}" for reason, count in e.reasons.items()),
        ),
        _line(
            "tokens",
            f"{e.tokens:,}, {e.supervised / max(e.tokens, 1):.0%} supervised; longest sample "
            f"{e.longest:,}",
        ),
    ]
    if e.left_samples != e.samples:
        part = "" if e.shard == "0/1" else f"shard {e.shard} has {e.shard_samples:,}; "
        lines.append(
            _line("to do", f"{part}{e.left_samples:,} samples, {e.left_tokens:,} tokens are left")
        )
    lines += [
        _line(
            "batches",
            f"{e.batches:,} of at most {e.batch_tokens:,} tokens, {e.fill:.0%} full",
        ),
        _line("disk", f"{size(e.disk)} of {size(e.free)} free", bar=e.disk / max(e.free, 1)),
        _line(
            "GPU memory", _device(e), bar=e.device.total / e.device_free if e.device_free else None
        ),
        _line("host memory", _host(e), bar=e.host / max(e.host_free, 1)),
    ]
    if e.seconds is not None:
        lines.append(_line("time", f"{duration(e.seconds)} at the rate given"))
    lines += ["", "on disk in other layouts and dtypes:", *_choice_lines(e)]
    lines += ["", *(f"WILL NOT FIT: {problem}" for problem in e.problems)]
    return "\n".join(lines).rstrip()


def _line(name: str, text: str, bar: float | None = None) -> str:
    if bar is None:
        return f"{name:>12}  {text}"
    filled = min(round(bar * 20), 20)
    return f"{name:>12}  {text:<44}[{'#' * filled}{'.' * (20 - filled)}]"


def _device(e: Estimate) -> str:
    parts = f"{size(e.device.total)} a GPU" + (
        f" of {size(e.device_free)}" if e.device_free else ""
    )
    return parts + (f", --tp {e.tp}" if e.tp > 1 else "")


def _host(e: Estimate) -> str:
    parts = f"{size(e.host)} of {size(e.host_free)} free"
    return parts + (f", {e.writers} writers" if e.writers > 1 else "")


def _choice_lines(e: Estimate) -> list[str]:
    lines: list[str] = []
    for key, count in e.choices.items():
        name, _, dtype = key.partition(" ")
        mark = "  <- this run" if (name, dtype) == (e.layout, e.dtype) else ""
        lines.append(f"{name:>18}  {dtype:<14}{size(count):>12}{mark}")
    return lines
