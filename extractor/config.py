"""The frozen configuration of a run: the command line, a YAML file of the same fields, or both.

Help texts are the fields' own docstrings. Nothing here looks at a file or at the model: what needs
them is resolved later, into records of their own (ModelSpec, States).
"""

import dataclasses
import difflib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro
import yaml

from extractor.errors import UsageError

C = TypeVar("C")
StoredDtype = Literal["auto", "bfloat16", "float16", "float32", "float8_e4m3fn"]
LayoutName = Literal[
    "native", "specforge", "specforge-dflash", "specforge-dspark", "speculators", "modelopt"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Which rows, and how they become ids and masks."""

    model: str
    """Folder of the target model, or its hub id."""
    data: tuple[str, ...]
    """Rows: .jsonl, .json, .jsonl.gz, .jsonl.zst, .parquet, a save_to_disk folder, a folder of
    these, or a hub dataset id; several are read in the order given."""
    output: Path
    """Folder to write; made if missing; a folder of another run is refused."""
    max_length: int | None = None
    """Most tokens a sample; default: the model's context, and a longer row is a bad row."""
    overlong: Literal["truncate", "skip"] = "truncate"
    """What --max-length does to a longer sample: keep its first tokens, or reject it."""
    bad_rows: Literal["fail", "skip"] = "fail"
    """A row that cannot be used: stop before the model loads, naming each, or go on without it."""
    chat_template: Path | None = None
    """A Jinja file instead of the tokenizer's own template."""
    template_arg: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """KEY=VALUE for the template, such as enable_thinking=false; repeatable."""
    supervise: Literal["assistant", "last", "all"] = "assistant"
    """What loss_mask marks: every assistant turn, the last one, or every token."""
    turns: Literal["whole", "each"] = "whole"
    """One sample a conversation, or one an assistant turn."""
    min_length: int = 1
    """Reject samples of fewer tokens."""
    min_supervised: int = 1
    """Reject samples with fewer supervised tokens."""
    limit: int | None = None
    """Use only this many rows: the first, or with --shuffle-seed a fixed random choice."""
    shuffle_seed: int | None = None
    """Choose --limit's rows at random, the same for the same seed."""
    draft_vocab_size: int | None = None
    """Also write vocab/d2t and t2d for a drafter of this many tokens, the most frequent ones."""
    trust_remote_code: bool = False
    """Let the model's and the tokenizer's own Python code run."""
    workers: int | None = None
    """Processes that tokenize; default: the CPU cores this process may use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractConfig(DataConfig):
    """Write a model's hidden states for every row, one safetensors file a sample."""

    layers: str = "eagle3"
    """States to keep, as 0-based layers: eagle3 (1, n//2-1, n-4), dflash:K, draft:PATH (a
    drafter's config.json), or a list such as 2,30,58,embed."""
    final: bool = True
    """Also keep the state after the final norm, which lm_head reads."""
    dtype: StoredDtype = "auto"
    """Stored dtype; auto is the model's own; float8_e4m3fn adds a scale a token."""
    topk_logits: int = 0
    """Also keep, of each token's next-token distribution, this many of the largest log-probabilities
    and their ids; runs lm_head, and needs no final state."""
    tp: int | None = None
    """Tensor-parallel size; default: all ranks, one replica."""
    batch_tokens: int | None = None
    """Token budget of one forward pass; default: chosen from memory, and printed."""
    shard: str = "0/1"
    """I/N: this job's part of the rows, for job arrays."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto takes CUDA when there is one."""
    sglang: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="KEY=VALUE")
    ] = ()
    """Any field of SGLang's ServerArgs; repeatable."""
    layout: LayoutName = "native"
    """Whose file format to write; each keeps its own project's conventions, and adds the last
    layer's state or the final one where its reader wants it (docs/formats.md)."""
    durability: Literal["none", "file", "group"] = "none"
    """When files are forced to disk: left to the system, each one, or a batch at a time."""
    stuck_after: float = 40.0
    """Seconds that one batch may take in the model before the run ends as stuck; the first may take
    ten minutes, and each 20 times what the slowest so far took a token; 0: as long as it likes."""
    writers: int | None = None
    """Writer threads, with a GPU processes; default: a few, and more up to the CPU cores while the
    disk is behind."""
    host_memory: float | None = None
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
    tokens_per_second: float | None = None
    """With --dry-run: estimate the time, at this rate of all replicas together."""
    verbose: bool = False
    """Show SGLang's own log too."""

    @property
    def shard_index(self) -> tuple[int, int]:
        """(I, N) of --shard I/N. Raises UsageError unless 0 <= I < N."""
        index, slash, count = self.shard.partition("/")
        if not (slash and index.isdigit() and count.isdigit() and int(index) < int(count)):
            raise UsageError(f"--shard {self.shard}: wanted I/N with 0 <= I < N, such as 0/4")
        return int(index), int(count)

    @property
    def sglang_args(self) -> dict[str, str]:
        return dict(key_value(item, "--sglang") for item in self.sglang)

    def check(self) -> None:
        """Raises UsageError for what is wrong whatever the model and the machine are."""
        for name in (
            "tp",
            "batch_tokens",
            "max_length",
            "writers",
            "limit",
            "workers",
            "draft_vocab_size",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} {value}: wanted 1 or more")
        if self.topk_logits < 0:
            raise UsageError(f"--topk-logits {self.topk_logits}: wanted a number, or 0 for none")
        if self.stuck_after < 0:
            raise UsageError(f"--stuck-after {self.stuck_after}: wanted seconds, or 0 for no limit")
        if self.host_memory is not None and self.host_memory <= 0:
            raise UsageError(f"--host-memory {self.host_memory}: wanted GiB above 0")
        _ = self.shard_index, self.sglang_args
        if not self.dry_run and (self.json or self.tokens_per_second is not None):
            raise UsageError("--json and --tokens-per-second go with --dry-run")
        if self.tokens_per_second is not None and self.tokens_per_second <= 0:
            raise UsageError(f"--tokens-per-second {self.tokens_per_second}: wanted more than 0")
        if self.shuffle_seed is not None and self.limit is None:
            raise UsageError("--shuffle-seed chooses the rows of --limit: give --limit too")


def key_value(text: str, flag: str) -> tuple[str, str]:
    """ "a=b" to ("a", "b"), dashes of the key as underscores. Raises UsageError."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UsageError(f"{flag} {text}: wanted KEY=VALUE")
    return key.strip().replace("-", "_"), value


def parse(kind: type[C], argv: Sequence[str], prog: str) -> C:
    """Read flags, and under them the YAML file of --config; flags win.

    Raises UsageError for an unreadable file or an unknown field; exits with 2, as command lines do,
    for an unknown or malformed flag.
    """
    rest, file = _take_config_flag(argv)
    given = {} if file is None else _read_yaml(kind, file)
    if not given:
        return tyro.cli(kind, args=rest, prog=prog)
    missing = {
        field.name: tyro.MISSING
        for field in dataclasses.fields(kind)  # pyright: ignore[reportArgumentType]
        if field.default is dataclasses.MISSING
    }
    return tyro.cli(kind, args=rest, prog=prog, default=kind(**{**missing, **given}))


def _take_config_flag(argv: Sequence[str]) -> tuple[list[str], Path | None]:
    rest: list[str] = []
    file: Path | None = None
    items = iter(argv)
    for item in items:
        if item == "--config":
            file = Path(next(items, ""))
        elif item.startswith("--config="):
            file = Path(item.removeprefix("--config="))
        else:
            rest.append(item)
    return rest, file


def _read_yaml(kind: type, file: Path) -> dict[str, Any]:
    try:
        loaded: Any = yaml.safe_load(file.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise UsageError(f"--config {file}: {error}") from error
    if not isinstance(loaded, dict):
        raise UsageError(f"--config {file}: wanted a mapping of flags to values")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    given: dict[str, Any] = {}
    for key, value in loaded.items():
        name = str(key).replace("-", "_")
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=3) or sorted(fields)
            raise UsageError(f"--config {file}: no field {key!r}; did you mean {', '.join(near)}?")
        given[name] = _from_yaml(name, value)
    return given


def _from_yaml(name: str, value: Any) -> Any:
    """YAML's own types to the fields': lists to tuples, mappings to KEY=VALUE, paths."""
    if name in ("sglang", "template_arg") and isinstance(value, dict):
        return tuple(f"{key}={_scalar(item)}" for key, item in value.items())
    if name in ("data", "sglang", "template_arg"):
        return (str(value),) if isinstance(value, str) else tuple(map(str, value))
    if name in ("output", "chat_template") and value is not None:
        return Path(value)
    if name == "layers":
        return ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return value


def _scalar(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def invocation() -> list[str]:
    """This process's command line, for run.json."""
    return list(sys.argv)
