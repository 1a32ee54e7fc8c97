"""The frozen configuration of a run: the command line, a YAML file of the same fields, or both.

Help texts are the fields' own docstrings, and bounds and choices are part of the fields' types: a
configuration is checked when it is made, wherever its values come from. Nothing here looks at the rows
or at the model: what needs them is resolved later, into records of their own (ModelSpec, States).
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
import tyro

from extractor import command_line
from extractor.errors import SharedUsageError, UsageError
from extractor.printable import printable
from extractor.values import AtLeastOne, KeyValue, NotNegative, Place, check_fields

C = TypeVar("C")
StoredDtype = Literal["auto", "bfloat16", "float16", "float32", "float8_e4m3fn"]
Pairs = Annotated[
    tyro.conf.UseAppendAction[tuple[KeyValue, ...]], tyro.conf.arg(metavar="KEY=VALUE")
]
Supervise = Literal["assistant", "last", "all"]
Turns = Literal["whole", "each"]
LayoutName = Literal[
    "native", "specforge", "specforge-dflash", "specforge-dspark", "speculators", "modelopt"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Which rows, and how they become ids and masks."""

    model: Place
    """Folder of the target model, or its hub id."""
    data: Annotated[tuple[Place, ...], msgspec.Meta(min_length=1)]
    """Rows: .jsonl, .json, .jsonl.gz, .jsonl.zst, .parquet, a save_to_disk folder, a folder of
    these, or a hub dataset id; several are read in the order given."""
    output: Path
    """Folder to write; made if missing; a folder of another run is refused."""
    max_length: AtLeastOne | None = None
    """Most tokens a sample; default: the model's context, and a longer row is a bad row."""
    overlong: Literal["truncate", "skip"] = "truncate"
    """What --max-length does to a longer sample: keep its first tokens, or reject it."""
    bad_rows: Literal["fail", "skip"] = "fail"
    """A row that cannot be used: stop before the model loads, naming each, or go on without it."""
    chat_template: Path | None = None
    """A Jinja file instead of the tokenizer's own template."""
    template_arg: Pairs = ()
    """KEY=VALUE for the template, such as enable_thinking=false; repeatable."""
    supervise: Supervise = "assistant"
    """What loss_mask marks: every assistant turn, the last one, or every token."""
    turns: Turns = "whole"
    """One sample a conversation, or one an assistant turn."""
    min_length: NotNegative = 1
    """Reject samples of fewer tokens."""
    min_supervised: NotNegative = 1
    """Reject samples with fewer supervised tokens."""
    limit: AtLeastOne | None = None
    """Use only this many rows: the first, or with --shuffle-seed a fixed random choice."""
    shuffle_seed: int | None = None
    """Choose --limit's rows at random, the same for the same seed."""
    draft_vocab_size: AtLeastOne | None = None
    """Also write vocab/d2t and t2d for a drafter of this many tokens, the most frequent ones."""
    trust_remote_code: bool = False
    """Let the model's and the tokenizer's own Python code run."""
    workers: AtLeastOne | None = None
    """Processes that tokenize; default: the CPU cores this process may use."""

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raises UsageError for what is wrong whatever the rows, the model and the machine are."""
        check_fields(self)
        if self.shuffle_seed is not None and self.limit is None:
            raise UsageError("--shuffle-seed chooses the rows of --limit: give --limit too")
        if self.max_length is not None and self.min_length > self.max_length:
            raise UsageError(
                f"--min-length {self.min_length} is more than --max-length {self.max_length}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractConfig(DataConfig):
    """Write a model's hidden states for every row, one safetensors file per sample."""

    layers: str = "eagle3"
    """States to keep, as 0-based layers: eagle3 (1, n//2-1, n-4), dflash:K, draft:PATH (a
    drafter's config.json), or a list such as 2,30,58,embed."""
    final: bool = True
    """Also keep the state after the final norm, which lm_head reads."""
    dtype: StoredDtype = "auto"
    """Stored dtype; auto is the model's own; float8_e4m3fn adds a scale a token."""
    topk_logits: NotNegative = 0
    """Also keep, of each token's next-token distribution, this many of the largest log-probabilities
    and their ids; runs lm_head, and needs no final state."""
    tp: AtLeastOne | None = None
    """Tensor-parallel size; default: all ranks, one replica."""
    batch_tokens: AtLeastOne | None = None
    """Token budget of one forward pass; default: chosen from memory, and printed."""
    shard: str = "0/1"
    """I/N: this job's part of the rows, for job arrays."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto takes CUDA when there is one."""
    sglang: Pairs = ()
    """Any field of SGLang's ServerArgs; repeatable."""
    layout: LayoutName = "native"
    """Whose file format to write; each keeps its own project's conventions, and adds the last
    layer's state or the final one where its reader wants it (docs/formats.md)."""
    durability: Literal["none", "file", "group"] = "none"
    """When files are forced to disk: left to the system, each one, or a batch at a time."""
    stuck_after: Annotated[float, msgspec.Meta(ge=0)] = 40.0
    """Seconds that one batch may take in the model before the run ends as stuck; the first may take
    ten minutes, and each 20 times what the slowest so far took a token; 0: as long as it likes."""
    writers: AtLeastOne | None = None
    """Writer threads, with a GPU processes; default: a few, and more up to the CPU cores while the
    disk is behind."""
    host_memory: Annotated[float, msgspec.Meta(gt=0, le=1_000_000)] | None = None
    """Most GiB of states in host memory at a time; default: four batches."""
    self_check: bool = True
    """Prove the captured layers on a short prompt before the run."""
    layer_proof: bool = True
    """Compare a layer of each kind with transformers' own, on the real weights, before the run."""
    dry_run: bool = False
    """Print rows, tokens, batches, bytes on disk and memory, and stop; what was tokenized is kept
    for the run."""
    json: bool = False
    """With --dry-run: print JSON, for scripts."""
    tokens_per_second: Annotated[float, msgspec.Meta(ge=0.001)] | None = None
    """With --dry-run: estimate the time, at this rate of all replicas together."""
    verbose: bool = False
    """Show SGLang's own log too."""

    @property
    def shard_index(self) -> tuple[int, int]:
        """(I, N) of --shard I/N. Raises UsageError unless 0 <= I < N."""
        index, slash, count = self.shard.partition("/")
        good = slash and all(part.isascii() and part.isdigit() for part in (index, count))
        if not (good and len(self.shard) <= 20 and int(index) < int(count)):
            shown = printable(self.shard)
            raise UsageError(f"--shard {shown}: wanted I/N with 0 <= I < N, such as 0/4")
        return int(index), int(count)

    @property
    def sglang_args(self) -> dict[str, str]:
        return dict(key_value(item, "--sglang") for item in self.sglang)

    def check(self) -> None:
        DataConfig.check(self)
        _ = self.shard_index
        if not self.dry_run and (self.json or self.tokens_per_second is not None):
            raise UsageError("--json and --tokens-per-second go with --dry-run")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareConfig(DataConfig):
    """Tokenize and mask the rows, beside the output; extract goes on from there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowConfig:
    """A sample in the terminal, its supervised text coloured; a rejected row says why."""

    target: Annotated[Place, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    """An output folder, or a data file (then give --model)."""
    row: NotNegative = 0
    """Number of the row, from 0."""
    model: Place | None = None
    """Where the tokenizer comes from, for a data file or a folder that was moved."""
    ids: bool = False
    """Also a line a token: position, id, mask, text."""
    chat_template: Path | None = None
    """As in extract, for a data file."""
    turns: Turns = "whole"
    """As in extract, for a data file."""
    supervise: Supervise = "assistant"
    """As in extract, for a data file."""
    trust_remote_code: bool = False
    """As in extract."""


def key_value(text: str, flag: str) -> tuple[str, str]:
    """ "a=b" to ("a", "b"), dashes of the key as underscores. Raises UsageError."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UsageError(f"{flag} {printable(text)}: wanted KEY=VALUE")
    return key.strip().replace("-", "_"), value


def parse(kind: type[C], argv: Sequence[str], prog: str) -> C:
    """Read flags, and under them the YAML file of --config; flags win.

    The file of an extract serves every verb. Raises UsageError for whatever is wrong in either; exits
    with 0 for --help.
    """
    return command_line.read(kind, argv, prog, ExtractConfig)


def read_extract(argv: Sequence[str]) -> ExtractConfig:
    """parse() of extract's command line, which all ranks have in common. Raises SharedUsageError."""
    try:
        return parse(ExtractConfig, argv, "extractor extract")
    except UsageError as error:
        raise SharedUsageError(str(error)) from error


def invocation() -> list[str]:
    """This process's command line, for run.json."""
    return list(sys.argv)
