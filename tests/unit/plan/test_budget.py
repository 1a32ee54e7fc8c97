"""The token budget: larger for small models, halved where memory lacks, never where it was asked for."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from extractor.layouts import Layout
from extractor.model import ModelSpec
from extractor.pages import GIB
from extractor.plan import batches as plan
from extractor.plan.budget import (
    PROCESS_BYTES,
    RING_SLOTS,
    WRITER_BYTES,
    Ask,
    Budget,
    Room,
    batch_tokens_of,
    host_need,
    lacking,
    sizes,
)
from extractor.prepared.store import PreparedStore
from extractor.run.loop import Sink, Writing

ROW = 8192  # four states of 1,024 values in bfloat16
PLENTY = Room(device=100 * GIB, host=100 * GIB)


def small(weights: float = 1.2e9) -> ModelSpec:
    return ModelSpec(
        path=Path("small"),
        architecture="Qwen3ForCausalLM",
        num_layers=28,
        hidden_size=1024,
        num_heads=16,
        num_kv_heads=8,
        vocab_size=151_936,
        context_length=40_960,
        dtype="bfloat16",
        kv_bytes_per_token=28 * 2 * 8 * 128 * 2,
        weight_bytes=int(weights),
        digest="",
    )


def ask(**changed: Any) -> Ask:
    given = {"spec": small(), "device": "cuda", "tp": 1, "row_bytes": ROW, "longest": 2048}
    return Ask(**given | changed)


def sized(free: Room = PLENTY, **changed: Any) -> Budget:
    return sizes(ask(**changed), free)


@pytest.mark.parametrize(
    ("weights", "tp", "asked", "tokens"),
    [
        (1.2e9, 1, None, 65_536),
        (3.4e9, 1, None, 32_768),
        (16.4e9, 1, None, 16_384),
        (1.2e9, 2, None, 16_384),
        (0, 1, None, 16_384),
        (1.2e9, 1, 5_000, 5_000),
    ],
)
def test_default(weights: float, tp: int, asked: int | None, tokens: int) -> None:
    assert batch_tokens_of(small(weights), "cuda", tp, asked) == tokens


def test_little_gpu_memory_halves_the_default() -> None:
    free = Room(device=8 * GIB, host=None)
    budget = sized(free)
    assert 2_048 <= budget.max_tokens < 65_536
    assert lacking(budget, ask(), free) is None
    twice = sized(free, batch_tokens=budget.max_tokens * 2)
    assert twice.max_tokens == budget.max_tokens * 2
    assert "too little GPU memory" in str(lacking(twice, ask(), free))


def test_where_halving_does_not_help_the_default_is_complained_about() -> None:
    free = Room(device=GIB, host=None)
    budget = sized(free)
    assert "65,536 tokens" in str(lacking(budget, ask(), free))


def test_a_small_host_ring_keeps_its_slots() -> None:
    budget = sized(host_gib=0.5)
    assert budget.slots == RING_SLOTS and budget.max_tokens == 16_384
    assert budget.states_bytes <= 0.5 * GIB


def test_every_writer_of_a_machine_has_a_ring() -> None:
    alone, eight = (Room(device=None, host=3 * GIB, writers=count) for count in (1, 8))
    budget = sized(alone)
    assert budget.max_tokens == 65_536 and budget.states_bytes == 2 * GIB
    assert "too little host memory" in str(lacking(budget, ask(), eight))
    assert sized(eight).host_bytes * 8 <= 3 * GIB


def test_what_is_taken_beside_states() -> None:
    alone = sized().beside_bytes
    assert sized(writers=64).beside_bytes - alone == 48 * PROCESS_BYTES
    assert sized(device="cpu").beside_bytes == WRITER_BYTES
    # A copy of each sample that is being written, which are never more than there are states.
    copied = sized(copied=True, writers=16, longest=2048)
    assert copied.beside_bytes == WRITER_BYTES + 16 * 2048 * ROW
    long = sized(copied=True, writers=16, longest=300_000)
    assert long.states_bytes == 300_000 * ROW == long.beside_bytes - WRITER_BYTES


@pytest.mark.parametrize(
    ("longest", "slots", "ready"),
    [(100, 4, 4), (100, 9, 4), (101, 4, 2), (350, 4, 0), (900, 4, 0), (250, 9, 4), (650, 9, 2)],
)
def test_buffers_that_are_ready_before_the_first_batch(
    longest: int, slots: int, ready: int
) -> None:
    """As many as there are by default, and none that the longest batch would take the place of."""
    budget = Budget(
        max_tokens=100,
        max_sequences=8,
        longest=longest,
        slot_bytes=4096,
        slots=slots,
        beside_bytes=0,
        device_bytes=0,
    )
    lengths = np.array([longest, *[100] * 12])
    batches = plan.batches(np.arange(len(lengths)), lengths, 100, 8)
    store = cast(PreparedStore, SimpleNamespace(lengths=lengths))
    layout = cast(Layout, None)
    sink = Sink(output=Path("unused"), journal="unused")
    writing = Writing.begin(store, batches, layout, budget, sink, torch.device("cpu"))
    assert len(writing.ring._free) == ready


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_what_is_needed_of_the_host_is_where_a_run_is_refused(device: str) -> None:
    wanted = ask(device=device, batch_tokens=4096)
    budget = sizes(wanted, PLENTY)
    need = host_need(budget, wanted, 2)
    assert need == 2 * budget.host_bytes + (budget.device_bytes if device == "cpu" else 0)
    assert lacking(budget, wanted, Room(device=None, host=need, writers=2)) is None
    short = lacking(budget, wanted, Room(device=None, host=need - 1, writers=2))
    assert "too little host memory" in str(short)
