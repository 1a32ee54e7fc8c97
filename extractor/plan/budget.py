"""How many tokens go through the model at a time, and whether the memory is there for it."""

from dataclasses import dataclass, replace

import torch

from extractor.engine.base import CHUNK_BYTES
from extractor.errors import UsageError
from extractor.model import ModelSpec
from extractor.pages import GIB, available_host_bytes

DEFAULT_TOKENS = {"cuda": 16_384, "cpu": 2_048}
MOST_TOKENS, LEAST_TOKENS = 65_536, 2_048

# Bytes of weights times tokens of a pass, from where on a GPU works longer than its launches take.
ENOUGH_WORK = 60e12
MAX_SEQUENCES = 512
RING_SLOTS = 4
MOST_WRITERS = 16  # files written at a time by one writer, unless --writers says another number

# Of host memory, what a writer takes beside states: samples, headers and lines under way, and what CUDA
# loads for the first full batch, 50 MiB on an H200 (docs/performance.md); and each of its processes.
WRITER_BYTES, PROCESS_BYTES = 128 << 20, 12 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The sizes that a run is built with.

    Attributes:
        max_tokens, max_sequences: of one batch.
        longest: tokens of the longest sample.
        slot_bytes, slots: the host ring.
        beside_bytes: of host memory, what a writer takes beside states, at most.
        device_bytes: estimated need of one rank: weights, keys and values, states, activations.
    """

    max_tokens: int
    max_sequences: int
    longest: int
    slot_bytes: int
    slots: int
    beside_bytes: int
    device_bytes: int

    @property
    def states_bytes(self) -> int:
        """The most that states take in host memory: the ring's, or the longest sample's by itself."""
        return max(self.slot_bytes * self.slots, self.slot_bytes // self.max_tokens * self.longest)

    @property
    def host_bytes(self) -> int:
        """The most that a writer takes in host memory over what the model does."""
        return self.states_bytes + self.beside_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Estimated memory of one rank's device, in bytes.

    Attributes:
        weights: this rank's part.
        kv: keys and values of the largest batch, or of the longest sample.
        states: two batches of them, one being computed and one on its way to the host.
        activations: of one forward.
        logits: of the part of a batch that lm_head sees at a time; none without top-k logits.
    """

    weights: int
    kv: int
    states: int
    activations: int
    logits: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.states + self.activations + self.logits


def batch_tokens_of(spec: ModelSpec, device: str, tp: int, asked: int | None) -> int:
    """Token budget of a forward: --batch-tokens, or the device's default, which is larger where the
    model is so small that launching a pass would take as long as the pass. (Over several ranks, which
    cannot make it smaller in mid-run, it stays.)"""
    if asked:
        return asked
    tokens = DEFAULT_TOKENS[device]
    if device == "cpu":
        return min(tokens, max(spec.context_length, 1))
    weights = spec.weight_bytes  # 0 where there are no files, whose model may be of any size
    while tp == 1 and weights and tokens < MOST_TOKENS and weights * tokens < ENOUGH_WORK:
        tokens *= 2
    return tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Free memory that a budget must fit.

    Attributes:
        device, host: bytes; None where it cannot be known.
        writers: of this machine, each with a ring of its own.
    """

    device: int | None
    host: int | None
    writers: int = 1


def room(device: str, writers: int) -> Room:
    """What is free here and now."""
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else None
    return Room(device=free, host=available_host_bytes(), writers=writers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a budget is wanted for.

    Attributes:
        device: "cuda" or "cpu".
        row_bytes: stored of a token.
        longest: tokens of the longest sample.
        batch_tokens, host_gib: --batch-tokens and --host-memory; None for the default.
        topk: of --topk-logits.
        writers: files written at a time.
        copied: a file is put together in memory before it is written.
    """

    spec: ModelSpec
    device: str
    tp: int
    row_bytes: int
    longest: int
    batch_tokens: int | None = None
    host_gib: float | None = None
    topk: int = 0
    writers: int = MOST_WRITERS
    copied: bool = False


def needs(ask: Ask, max_tokens: int) -> Needs:
    spec, longest = ask.spec, ask.longest
    pool = max(max_tokens, longest)
    return Needs(
        weights=spec.weight_bytes // ask.tp,
        kv=pool * spec.kv_bytes_per_token // max(min(ask.tp, spec.num_kv_heads), 1),
        states=ask.row_bytes * max(max_tokens * 2, longest * 2),
        activations=max_tokens * spec.hidden_size * 2 * 16,
        # As computed, in float32, and once more for the logsumexp.
        logits=3 * CHUNK_BYTES if ask.topk else 0,
    )


def choose(ask: Ask, writers: int = 1) -> Budget:
    """The budget for what is free here and now. Raises UsageError when it does not fit."""
    free = room(ask.device, writers)
    budget = sizes(ask, free)
    if problem := lacking(budget, ask, free):
        raise UsageError(problem)
    return budget


def sizes(ask: Ask, free: Room) -> Budget:
    """The budget asked for, or the default one: halved while it does not fit or leaves a host ring too
    small to overlap anything. Where halving does not help, the default one.

    Raises UsageError when host_gib holds not even one token."""
    tokens = batch_tokens_of(ask.spec, ask.device, ask.tp, ask.batch_tokens)

    def fits(budget: Budget) -> bool:
        small = budget.slots < RING_SLOTS and budget.max_tokens > DEFAULT_TOKENS[ask.device]
        return not small and lacking(budget, ask, free) is None

    first = tried = _sized(ask, tokens)
    if ask.batch_tokens:
        return first
    while not fits(tried) and tokens // 2 >= LEAST_TOKENS:
        tokens //= 2
        tried = _sized(ask, tokens)
    return tried if fits(tried) else first


def _sized(ask: Ask, max_tokens: int) -> Budget:
    slot_bytes, slots = ask.row_bytes * max_tokens, RING_SLOTS
    if ask.host_gib is not None:
        slots = int(ask.host_gib * GIB) // slot_bytes
        if slots < 1:
            max_tokens = int(ask.host_gib * GIB) // ask.row_bytes
            slots = 1
            if max_tokens < 1:
                raise UsageError(
                    f"--host-memory {ask.host_gib}: one token's states take {ask.row_bytes} B"
                )
            slot_bytes = ask.row_bytes * max_tokens
    budget = Budget(
        max_tokens=max_tokens,
        max_sequences=min(MAX_SEQUENCES, max_tokens),
        longest=ask.longest,
        slot_bytes=slot_bytes,
        slots=slots,
        beside_bytes=0,
        device_bytes=needs(ask, max_tokens).total,
    )
    return replace(budget, beside_bytes=_beside(ask, budget.states_bytes))


def _beside(ask: Ask, states_bytes: int) -> int:
    """Budget.beside_bytes."""
    if ask.copied:
        return WRITER_BYTES + min(states_bytes, ask.writers * ask.row_bytes * ask.longest)
    return WRITER_BYTES + (ask.writers * PROCESS_BYTES if ask.device == "cuda" else 0)


def host_need(budget: Budget, ask: Ask, writers: int) -> int:
    """Bytes of host memory that the writers of one machine fill; on a CPU the model too."""
    return budget.host_bytes * writers + (budget.device_bytes if ask.device == "cpu" else 0)


def lacking(budget: Budget, ask: Ask, free: Room) -> str | None:
    """What there is too little of for this budget, as a sentence; None when it fits."""
    needed = host_need(budget, ask, free.writers)
    if ask.device != "cpu" and free.device is not None and budget.device_bytes > free.device:
        return (
            f"too little GPU memory: about {budget.device_bytes / GIB:.1f} GiB needed for weights, "
            f"a batch of {budget.max_tokens:,} tokens and the longest sample of {budget.longest:,}, and "
            f"{free.device / GIB:.1f} GiB free: use a larger --tp, a smaller --batch-tokens or "
            "--max-length"
        )
    if free.host is not None and needed > free.host:
        return (
            f"too little host memory: about {needed / GIB:.1f} GiB needed for batches of "
            f"{budget.max_tokens:,} tokens and the longest sample of {budget.longest:,}, and "
            f"{free.host / GIB:.1f} GiB free: use a smaller --batch-tokens, --host-memory or "
            "--max-length"
        )
    return None
