"""The target's most likely tokens: from logits, a part of the vocabulary on each rank, to the K largest
log-probabilities and their ids.

A rank reduces its own part to K candidates and a normalizer, so that ranks exchange 2K+1 numbers a
token and never the logits.
"""

from dataclasses import dataclass

import torch

from extractor.errors import UsageError

LOGPROBS, IDS = "topk_logprobs", "topk_ids"
CHUNK_BYTES = 128 << 20
"""Of the logits that are there at a time, in float32."""


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


def check_topk(k: int, vocab_size: int) -> None:
    """Raises UsageError unless the model has so many tokens."""
    if k > vocab_size:
        raise UsageError(f"--topk-logits {k}: the model has {vocab_size:,} tokens")
