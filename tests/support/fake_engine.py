"""A model without a model: states that follow from the ids, so that every file can be proved right.

It drives the whole pipeline in a second, in one process or many; a collective in each pass makes a
tensor-parallel replica hang and break as a real one does.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from extractor.engine.base import EngineInfo, EngineOptions, Numbers
from extractor.engine.settings import numbers
from extractor.model import ModelSpec
from extractor.ranks.place import Place
from extractor.records import IDS, LOGPROBS, Batch, CapturedBatch
from extractor.states import States

HIDDEN, LAYERS = 64, 8
PERIOD = 97


def expected(ids: torch.Tensor, name: str, hidden: int = HIDDEN) -> torch.Tensor:
    """State `name` of one sequence: bfloat16 [T, hidden], exact. Each token depends on all before."""
    number = {"embed": 101, "final": 211}.get(name) or int(name) * 13
    tokens = ids.cumsum(0).unsqueeze(1) + number + torch.arange(hidden).unsqueeze(0)
    return ((tokens % PERIOD).float() / 8).to(torch.bfloat16)


def expected_topk(ids: torch.Tensor, k: int) -> dict[str, torch.Tensor]:
    """topk_logprobs float32 and topk_ids int32 [T, k] of one sequence, exact."""
    tokens = ids.cumsum(0).unsqueeze(1) + torch.arange(k).unsqueeze(0)
    return {LOGPROBS: -(tokens % PERIOD).float() / 8, IDS: (tokens % 50_000).to(torch.int32)}


class FakeEngine:
    """See Engine. before(n) is called ahead of this rank's n-th pass and may raise, sleep or kill;
    states of poison tokens are not a number."""

    def __init__(
        self,
        spec: ModelSpec,
        states: States,
        place: Place,
        options: EngineOptions,
        before: Callable[[int], None],
        poison: Sequence[int] = (),
    ) -> None:
        self._poison = torch.tensor(poison, dtype=torch.int64)
        self._hidden, self._states, self._place = spec.hidden_size, states, place
        self._options, self._before = options, before
        self._passes = 0

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            device=self._options.device,
            dtype=torch.bfloat16,
            max_tokens=self._options.max_tokens,
            max_sequences=self._options.max_sequences,
            details={"fake": True},
        )

    def self_check(self) -> None: ...

    def layer_proof(self) -> None: ...

    def forward(self, batch: Batch) -> CapturedBatch:
        self._before(self._passes)
        self._passes += 1
        if self._place.tp > 1:
            seen = torch.tensor([batch.number])
            dist.all_reduce(seen)
            assert int(seen) == batch.number * self._place.tp, "ranks run different batches"
        sequences = batch.input_ids.split(list(batch.lengths))
        states = {
            name: torch.cat([expected(ids, name, self._hidden) for ids in sequences])
            for name in self._states.names
        }
        for state in states.values():
            state[torch.isin(batch.input_ids, self._poison)] = torch.nan
        if k := self._options.topk:
            each = [expected_topk(ids, k) for ids in sequences]
            states |= {key: torch.cat([part[key] for part in each]) for key in (LOGPROBS, IDS)}
        return CapturedBatch(batch, states)

    def close(self) -> None: ...


class FakeBackend:
    """See Backend. on_load() is called where weights would be read, on_import() where SGLang would be
    imported: by whoever is the first to need it."""

    def __init__(
        self,
        before: Callable[[int], None] = lambda _: None,
        on_load: Callable[[], None] = lambda: None,
        on_import: Callable[[], None] = lambda: None,
        poison: Sequence[int] = (),
    ) -> None:
        self._poison = poison
        self._before, self._on_load, self._on_import = before, on_load, on_import
        self._imported = False

    def choose_device(self, wanted: str, place: Place) -> torch.device:
        return torch.device("cpu")

    def prepare_process(self, device: torch.device, place: Place, verbose: bool = False) -> None:
        torch.set_num_threads(1)

    def import_modules(self, device: torch.device) -> None:
        if not self._imported:
            self._imported = True
            self._on_import()

    def numbers(
        self, spec: ModelSpec, device: torch.device, sglang_args: Mapping[str, str]
    ) -> Numbers:
        return numbers(spec, device, sglang_args)

    def check_model(self, spec: ModelSpec, place: Place, sglang_args: Mapping[str, str]) -> None:
        self.import_modules(torch.device("cpu"))

    def applies_window(self, spec: ModelSpec) -> bool:
        return False

    def build(
        self, spec: ModelSpec, states: States, place: Place, options: EngineOptions
    ) -> FakeEngine:
        self.import_modules(options.device)
        self._on_load()
        return FakeEngine(spec, states, place, options, self._before, self._poison)


def make_model(folder: Path) -> Path:
    """A folder that ModelSpec can read; the weights file is there to be digested."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["FakeForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "vocab_size": 50_000,
        "max_position_embeddings": 4096,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    return folder


def make_rows(path: Path, count: int, seed: int = 0, ids: Sequence[str] | None = None) -> Path:
    """Pre-tokenized rows of 5 to 60 tokens."""
    generator = torch.Generator().manual_seed(seed)
    lines = []
    for row in range(count):
        length = int(torch.randint(5, 60, (1,), generator=generator))
        tokens = torch.randint(0, 50_000, (length,), generator=generator).tolist()
        name = f"row{row}" if ids is None else ids[row]
        lines.append(json.dumps({"id": name, "input_ids": tokens, "loss_mask": [1] * length}))
    path.write_text("\n".join(lines) + "\n")
    return path
