"""The target's top-k log-probabilities, from the state after the final norm, by SGLang's own lm_head.

The wrapper's forward is not what a run calls (docs/decisions/0001-backbone-not-wrapper.md), so what it
does between the backbone and the logits is reproduced here: lm_head by the logits processor's own
method, whatever its quantization, then its scale and its soft cap. That this is all is not believed but
seen: at start-up the wrapper runs once, on a short prompt, and must come to the same numbers.

Each rank has a part of the vocabulary. It reduces its logits to K candidates and a normalizer, so that
ranks exchange 2K+1 numbers per token and never the logits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from extractor.engine import compat
from extractor.engine.base import CHUNK_BYTES
from extractor.errors import RunError
from extractor.records import IDS, LOGPROBS

# Relative difference of the state that the wrapper's lm_head reads; of logits, over their largest.
SAME_STATE, SAME_LOGITS = 0.01, 0.02


@dataclass(frozen=True, slots=True)
class Wrapper:
    """What the wrapper did with a short prompt.

    Attributes:
        processor: its LogitsProcessor.
        head: the lm_head given to it; with tied embeddings often the embedding itself.
        state: [T, H], what lm_head was given.
        logits: [V], of the last token.
    """

    processor: Any
    head: Any
    state: torch.Tensor
    logits: torch.Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """Which columns of a rank's logits are tokens; what lies between and behind them is padding.

    Attributes:
        spans: (first column, one past the last, id of the first), in order, without overlap.
    """

    spans: tuple[tuple[int, int, int], ...]

    def __len__(self) -> int:
        """How many tokens this rank has."""
        return sum(end - begin for begin, end, _ in self.spans)


@dataclass(frozen=True, slots=True)
class Share:
    """Of the vocabulary, what one rank's logits have.

    Attributes:
        part: the tokens in them.
        columns: their width, padding counted.
        ranks: how many share the vocabulary; 1 when every rank has all of it.
    """

    part: Part
    columns: int
    ranks: int


@dataclass(frozen=True, slots=True)
class Candidates:
    """Of each token the K best of one part of the vocabulary.

    Attributes:
        logits: float32 [T, K], largest first; -inf where the part has fewer tokens than K.
        ids: int32 [T, K].
        normalizer: float32 [T], the logsumexp of all the part's logits.
    """

    logits: torch.Tensor
    ids: torch.Tensor
    normalizer: torch.Tensor


class TopK:
    """Top-k of every token's distribution; all tp ranks call it together.

    Args:
        k: how many.
        seen: the wrapper's run of the prompt.
        final: [T, H], the state after the final norm of the same prompt.
        name: the model's class, for messages.
        ranks: tp size.

    Raises RunError, with the model's name, when the wrapper's logits are not what is computed here.
    """

    def __init__(self, k: int, seen: Wrapper, final: torch.Tensor, name: str, ranks: int) -> None:
        self._k, self._processor, self._head = k, seen.processor, seen.head
        self._share = _share_of(seen.head, int(seen.processor.vocab_size), ranks)
        if len(seen.state) != len(final) or _difference(seen.state, final) > SAME_STATE:
            raise _unlike(name, "it changes the state between the final norm and lm_head")
        ours = self(final[-1:])
        theirs = seen.logits.float().log_softmax(-1)
        wanted = theirs[ours[IDS][0].long()]
        limit = SAME_LOGITS * float(seen.logits.float().abs().max()) + 1e-3
        if not float((ours[LOGPROBS][0] - wanted).abs().max()) <= limit:
            raise _unlike(name, "it treats logits in a way of its own")

    def __call__(self, final: torch.Tensor) -> dict[str, torch.Tensor]:
        """topk_logprobs float32 [T, K] and topk_ids int32 [T, K] of states [T, H]; like a forward, it
        may return before the device is done."""
        rows = max(CHUNK_BYTES // (4 * self._share.columns), 1)
        found = [self._chunk(states) for states in final.split(rows)]
        own = Candidates(
            torch.cat([c.logits for c in found]),
            torch.cat([c.ids for c in found]),
            torch.cat([c.normalizer for c in found]),
        )
        if self._share.ranks == 1:
            every = (own.logits[None], own.ids[None], own.normalizer[None])
        else:
            every = (_gather(own.logits), _gather(own.ids), _gather(own.normalizer))
        logprobs, ids = merge(*every)
        return {LOGPROBS: logprobs, IDS: ids}

    def _chunk(self, states: torch.Tensor) -> Candidates:
        logits = self._processor._compute_lm_head(states, self._head)
        if self._processor.logit_scale is not None:
            logits = logits * self._processor.logit_scale
        if cap := self._processor.final_logit_softcapping:
            logits = cap * torch.tanh(logits.float() / cap)
        return candidates(logits, self._share.part, self._k)


def watch_wrapper(model: Any, run: Callable[[], Any], name: str) -> Wrapper:
    """Run the wrapper's forward and see what its logits processor is given and makes of it.

    Raises RunError when the wrapper does not run like this, or has no such processor."""
    kind = compat.symbol("sglang.srt.layers.logits_processor", "LogitsProcessor")
    given: list[tuple[Any, torch.Tensor, Any]] = []

    def note(processor: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        # forward(input_ids, hidden_states, lm_head, ...), by place or by name.
        named = dict(zip(("input_ids", "hidden_states", "lm_head"), args, strict=False)) | kwargs
        given.append((processor, named["hidden_states"].clone(), named["lm_head"]))

    hooks = [
        module.register_forward_pre_hook(note, with_kwargs=True)
        for module in model.modules()
        if isinstance(module, kind)
    ]
    try:
        output = run()
    except Exception as error:
        raise _unlike(name, f"its own forward fails here ({error!r})") from error
    finally:
        for hook in hooks:
            hook.remove()
    if len(given) != 1:
        raise _unlike(name, f"its forward called {len(given)} logits processors")
    processor, state, head = given[0]
    return Wrapper(processor, head, state, output.next_token_logits[-1])


def _share_of(head: Any, vocab_size: int, ranks: int) -> Share:
    sharded = compat.symbol("sglang.srt.layers.vocab_parallel_embedding", "VocabParallelEmbedding")
    if not isinstance(head, sharded):  # a plain linear layer
        return Share(Part(((0, vocab_size, 0),)), vocab_size, 1)
    indices = head.shard_indices
    begin, end = indices.org_vocab_start_index, min(indices.org_vocab_end_index, vocab_size)
    spans = [(0, max(end - begin, 0), begin)]
    # Tokens that were added to the checkpoint's own lie behind the padding of these.
    begin, end = indices.added_vocab_start_index, min(indices.added_vocab_end_index, vocab_size)
    first = indices.num_org_elements_padded
    spans.append((first, first + max(end - begin, 0), begin))
    part = Part(tuple(span for span in spans if span[1] > span[0]))
    return Share(part, head.num_embeddings_per_partition, min(head.tp_size, ranks))


def _gather(own: torch.Tensor) -> torch.Tensor:
    """[R, ...]: this tensor of every rank of the replica."""
    # One after the other in the first dimension: the form that gloo and NCCL both know.
    ranks = dist.get_world_size()
    every = own.new_empty((ranks * len(own), *own.shape[1:]))
    dist.all_gather_into_tensor(every, own.contiguous())
    return every.view(ranks, *own.shape)


def _difference(state: torch.Tensor, other: torch.Tensor) -> float:
    wide, base = state.float(), other.float()
    return float((wide - base).norm() / base.norm().clamp_min(1e-30))


def _unlike(name: str, what: str) -> RunError:
    return RunError(
        f"--topk-logits: {name}'s logits are not computed here as it computes them: {what}. Nothing "
        "was written. Run without it, and compute logits from the final state (docs/formats.md)"
    )


def candidates(logits: torch.Tensor, part: Part, k: int) -> Candidates:
    """Of logits [T, columns] as one rank computed them. No step of it waits for the device."""
    wide = [logits[:, begin:end].float() for begin, end, _ in part.spans]
    rows, device = len(logits), logits.device
    best = torch.full((rows, k), float("-inf"), dtype=torch.float32, device=device)
    ids = torch.zeros((rows, k), dtype=torch.int32, device=device)
    if not len(part):
        return Candidates(best, ids, best.new_full((rows,), float("-inf")))
    values = wide[0] if len(wide) == 1 else torch.cat(wide, dim=-1)
    count = min(k, len(part))
    best[:, :count], at = values.topk(count, dim=-1)
    ids[:, :count] = _id_of(at, part).to(torch.int32)
    return Candidates(best, ids, values.logsumexp(dim=-1))


def _id_of(at: torch.Tensor, part: Part) -> torch.Tensor:
    """Places among a part's tokens, its padding left out, to ids."""
    ids, before = at, 0
    for begin, end, first in part.spans:
        ids = torch.where(at >= before, at - before + first, ids)
        before += end - begin
    return ids


def merge(
    logits: torch.Tensor, ids: torch.Tensor, normalizers: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities float32 [T, K], largest first, and ids int32 [T, K], from the candidates of
    all R ranks: logits and ids [R, T, K], normalizers [R, T]."""
    _, tokens, k = logits.shape
    values = logits.transpose(0, 1).reshape(tokens, -1)
    best, at = values.topk(k, dim=-1)
    chosen = ids.transpose(0, 1).reshape(tokens, -1).gather(-1, at)
    return best - normalizers.logsumexp(dim=0).unsqueeze(-1), chosen
