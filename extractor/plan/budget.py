"""The memory budget: how many tokens go through the model at a time, and whether memory suffices."""

from dataclasses import dataclass, replace

import torch

from extractor.engine.base import CHUNK_BYTES
from extractor.errors import UsageError
from extractor.model import ModelSpec
from extractor.pages import GIB, available_host_bytes

DEFAULT_TOKENS = {"cuda": 16_384, "cpu": 2_048}
MOST_TOKENS, LEAST_TOKENS = 65_536, 2_048

# Bytes of weights times tokens of a pass. Above this a GPU computes for longer than the launches take.
ENOUGH_WORK = 60e12
MAX_SEQUENCES = 512
RING_SLOTS = 4
MOST_WRITERS = 16  # files written at a time by one writer, unless --writers says another number

# Bytes of host memory that a writer takes beside states: samples, headers and journal lines in flight,
# and what CUDA loads for the first full batch, 50 MiB on an H200 (docs/performance.md). Then the bytes
# that each of its worker processes takes.
WRITER_BYTES, PROCESS_BYTES = 128 << 20, 12 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The sizes that a run is built with.

    Attributes:
        max_tokens, max_sequences: the most that one batch holds, except for a longer sample by itself.
        longest: tokens of the longest sample.
        slot_bytes, slots: size of a slot in bytes and number of slots of the host ring (HostRing).
        beside_bytes: the most host memory that a writer takes beside states, in bytes.
        device_bytes: estimated device memory of one rank in bytes (Needs.total).
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
        """The most bytes that states take in host memory: those of the ring, or of the longest sample
        if these are more."""
        return max(self.slot_bytes * self.slots, self.slot_bytes // self.max_tokens * self.longest)

    @property
    def host_bytes(self) -> int:
        """The most bytes of host memory that a writer takes beside the model's."""
        return self.states_bytes + self.beside_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Estimated memory of one rank's device, in bytes.

    Attributes:
        weights: this rank's part of the weights.
        kv: keys and values of the largest batch, or of the longest sample if it is longer.
        states: of two batches, one that is computed and one that is copied to the host.
        activations: of one forward pass.
        logits: of the part of a batch that lm_head takes at a time; 0 without top-k logits.
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
    """The most tokens of a forward pass: --batch-tokens, or a default.

    On a GPU the default is doubled, up to MOST_TOKENS, while the model is so small that launching a pass
    takes as long as computing it (ENOUGH_WORK). It is not doubled for tp > 1, because several ranks
    cannot make their batches smaller in the middle of a run.

    device: "cuda" or "cpu". asked: --batch-tokens, or None."""
    if asked:
        return asked
    tokens = DEFAULT_TOKENS[device]
    if device == "cpu":
        return min(tokens, max(spec.context_length, 1))
    # The size is 0 when there are no weight files; the model may then be large, and the default stays.
    weights = spec.weight_bytes
    while tp == 1 and weights and tokens < MOST_TOKENS and weights * tokens < ENOUGH_WORK:
        tokens *= 2
    return tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Free memory that a budget must fit.

    Attributes:
        device, host: free bytes; None when they cannot be known.
        writers: how many writers this machine has; each has a ring of its own.
    """

    device: int | None
    host: int | None
    writers: int = 1


def room(device: str, writers: int) -> Room:
    """The memory that is free on this machine. device: "cuda" or "cpu"."""
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else None
    return Room(device=free, host=available_host_bytes(), writers=writers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a budget depends on, apart from free memory.

    Attributes:
        spec: the model.
        device: "cuda" or "cpu".
        tp: how many ranks hold one copy of the model together.
        row_bytes: stored bytes per token.
        longest: tokens of the longest sample.
        batch_tokens, host_gib: --batch-tokens and --host-memory (in GiB); None for the default.
        topk: --topk-logits.
        writers: how many files one writer writes at a time.
        copied: whether a file is put together in memory before it is written.
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
    """Estimate the device memory of one rank for batches of at most max_tokens tokens.

    Keys and values are divided among the tp ranks up to the number of key-value heads. Activations are
    taken as 16 tensors [max_tokens, hidden_size] of 2 bytes per value."""
    spec, longest = ask.spec, ask.longest
    pool = max(max_tokens, longest)
    return Needs(
        weights=spec.weight_bytes // ask.tp,
        kv=pool * spec.kv_bytes_per_token // max(min(ask.tp, spec.num_kv_heads), 1),
        states=ask.row_bytes * max(max_tokens * 2, longest * 2),
        activations=max_tokens * spec.hidden_size * 2 * 16,
        # A chunk of logits is held as computed, in float32, and once more for the logsumexp.
        logits=3 * CHUNK_BYTES if ask.topk else 0,
    )


def choose(ask: Ask, writers: int = 1) -> Budget:
    """The budget for the memory that is free on this machine. Raises UsageError when it does not fit.

    writers: how many writers this machine has."""
    free = room(ask.device, writers)
    budget = sizes(ask, free)
    if problem := lacking(budget, ask, free):
        raise UsageError(problem)
    return budget


def sizes(ask: Ask, free: Room) -> Budget:
    """The budget for --batch-tokens, or for the default number of tokens.

    The default is halved, down to LEAST_TOKENS, while the budget does not fit, or while it is above the
    device's default and the host ring has too few slots to overlap copies and writes with the model.
    When halving does not help, the budget of the default is returned, which may not fit.

    Raises UsageError when host_gib is too small for one token's states."""
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
    """Budget.beside_bytes: a layout whose files are put together in memory adds a copy of the longest
    sample per file written at a time, and CUDA otherwise adds worker processes."""
    if ask.copied:
        return WRITER_BYTES + min(states_bytes, ask.writers * ask.row_bytes * ask.longest)
    return WRITER_BYTES + (ask.writers * PROCESS_BYTES if ask.device == "cuda" else 0)


def host_need(budget: Budget, ask: Ask, writers: int) -> int:
    """Bytes of host memory that all writers of one machine take; on a CPU the model's are included
    once."""
    return budget.host_bytes * writers + (budget.device_bytes if ask.device == "cpu" else 0)


def lacking(budget: Budget, ask: Ask, free: Room) -> str | None:
    """A sentence that says which memory is too small for this budget; None when the budget fits."""
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
