"""Proof that the checkpoint and the model fit: every parameter was filled, every tensor was read.

SGLang's loaders pass over a tensor that no parameter asks for, and leave a parameter that no tensor
fills as it was made: as ones, or as what happened to be in that memory. Both give states of another
model. So before the tensors come, each parameter is filled with a mark that no checkpoint holds, and
each tensor is handed to SGLang in a wrapping that notes whether it is used. What still has the mark
afterwards was not filled; what was not used was not read.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from extractor.engine import compat
from extractor.errors import RunError

# Bits of a NaN that arithmetic does not make, by dtype: a checkpoint's own NaN has other bits.
_MARKS: dict[torch.dtype, tuple[torch.dtype, int]] = {
    torch.float32: (torch.int32, 0x7FA5A5A5),
    torch.bfloat16: (torch.int16, 0x7FA5),
    torch.float16: (torch.int16, 0x7DA5),
    torch.float8_e4m3fn: (torch.uint8, 0x7F),
    torch.float8_e5m2: (torch.uint8, 0x7D),
}

# Of integers every value may be right, so a block of 16 bytes is the mark.
_BLOCK = (0x5AC3F10E9B7D2468, 0x1D3E5F708A9BACBD)
_PART = 1 << 26  # elements looked at together
_SHOWN = 4

# Parameters that need no tensor, and why.
NOT_FILLED: dict[str, str] = {
    r"\.(k|v|q|prob)_scale$": "scales of a quantized key-value cache, which a checkpoint may leave out",
}

# Tensors that need not be read, and why.
NOT_READ: dict[str, str] = {
    r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$": "tables that are computed",
    r"\.(k|v|q)(_proj)?\.?_?(output_)?scale$": "scales of a quantized key-value cache",
    r"(^|\.)mtp\.": "layers that predict further tokens, after the last decoder layer",
    r"(^|\.)lm_head\.": "not part of the states; logits are compared with the wrapper's own",
    r"\.attn\.(masked_)?bias$": "a causal mask",
}
_NOT_TEXT = re.compile(r"(^|[._])(vis|vit|audio|image|img|speech|mm_|multi_modal|talker|code2wav)")
_LAYER = re.compile(r"^(.*?)(?:layers|blocks|h)\.(\d+)\.")


@dataclass(slots=True)
class WeightAudit:
    """What came of loading on this rank.

    Attributes:
        watched: whether tensors came through SGLang's common loader, which is the one watched.
        unfilled: parameters with a part that no tensor filled.
        unread: tensors that were not used, by name.
        tensors: how many the checkpoint has.
    """

    watched: bool = False
    unfilled: list[str] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)
    tensors: int = 0

    def load(self, model: nn.Module, load: Callable[[Any], Any], weights: Iterable[Any]) -> Any:
        """model.load_weights(weights), watched. Parameters that stay as they were get back what they
        held before."""
        self.watched = True
        # A quantized layer may be padded beyond its tensors; then only an empty one is a gap.
        padded = getattr(model, "quant_config", None) is not None
        before = {name: _mark(param.data) for name, param in model.named_parameters()}
        result = load(self._watch(weights))
        for name, param in model.named_parameters():
            if (held := before.get(name)) is None:
                continue
            left = _marked(param.data)
            if left and not (padded and left < param.numel()):
                self.unfilled.append(name)
            if left:
                _restore(param.data, held)
        return result

    def _watch(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Any]:
        for name, tensor in weights:
            self.tensors += 1
            if _is_zero_bias(name, tensor):  # some formats write one for every matrix
                yield name, tensor
                continue
            self.unread.add(name)
            yield name, _Watched.of(tensor, lambda name=name: self.unread.discard(name))

    def settle(self, backbone: str, num_layers: int, head: bool, model: str, ranks: int) -> str:
        """What was proved, for run.json.

        Args:
            backbone: prefix of the backbone's parameters in the model, with its dot.
            head: logits are asked for, so that lm_head counts too.
            model: the class's name, for messages.
            ranks: tp size; a tensor that any of them read was read.

        Raises RunError naming what was not filled or not read."""
        if not self.watched:
            return (
                "not checked: SGLang loaded them in another way than from the checkpoint's tensors"
            )
        counted = [n for n in self.unfilled if n.startswith(backbone) or (head and "lm_head" in n)]
        unfilled = [n for n in counted if not _has_reason(n, NOT_FILLED)]
        if unfilled:
            raise RunError(
                f"{len(unfilled)} parameters of SGLang's {model} were filled by no tensor of the "
                f"checkpoint: {_some(unfilled)}. Nothing was written. A file of the checkpoint is "
                "missing, or its names are not this model's"
            )
        unread = self._unread_of_all(ranks)
        wrong = [n for n in sorted(unread) if _belongs(n, num_layers)]
        if wrong:
            raise RunError(
                f"{len(wrong)} tensors of the checkpoint were read by nothing in SGLang's {model}: "
                f"{_some(wrong)}. Nothing was written, for the states would not be this model's. "
                "Another SGLang release may read them (docs/families.md)"
            )
        return f"all parameters filled; {self.tensors - len(unread):,} of {self.tensors:,} tensors read"

    def _unread_of_all(self, ranks: int) -> set[str]:
        if ranks == 1:
            return self.unread
        every: list[Any] = [None] * ranks
        dist.all_gather_object(every, self.unread)
        return set.intersection(*every)


def _has_reason(name: str, reasons: dict[str, str]) -> bool:
    return any(re.search(pattern, name) for pattern in reasons)


def _belongs(name: str, num_layers: int) -> bool:
    """Whether a tensor is one that the states depend on."""
    if _has_reason(name, NOT_READ) or _NOT_TEXT.search(name):
        return False
    layer = _LAYER.match(name)
    return layer is None or int(layer[2]) < num_layers


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _is_zero_bias(name: str, tensor: torch.Tensor) -> bool:
    return name.endswith(".bias") and tensor.dim() == 1 and not bool(tensor.any())


# Marks of parameters --------------------------------------------------------------------------------
def _mark(data: torch.Tensor) -> torch.Tensor | None:
    """Fill a parameter with its dtype's mark, and return what to give back to a part that keeps it:
    the content of a vector, such as a norm of ones, else zeros. None for what cannot be marked."""
    if data.is_meta or not data.numel() or not data.is_contiguous():
        return None
    held = (
        data.clone() if data.dim() < 2 else torch.zeros((), dtype=torch.uint8, device=data.device)
    )
    if (mark := _MARKS.get(data.dtype)) is not None:
        data.view(mark[0]).fill_(_signed(*mark))
        return held
    blocks = _blocks(data)
    if blocks is None:
        return None
    blocks[:, 0], blocks[:, 1] = _BLOCK
    return held


def _marked(data: torch.Tensor) -> int:
    """How many elements still have the mark."""
    if (mark := _MARKS.get(data.dtype)) is not None:
        bits, wanted = data.view(mark[0]).flatten(), _signed(*mark)
        return int(sum((part == wanted).sum() for part in bits.split(_PART)))
    blocks = _blocks(data)
    assert blocks is not None
    found = sum(
        ((part[:, 0] == _BLOCK[0]) & (part[:, 1] == _BLOCK[1])).sum()
        for part in blocks.split(_PART)
    )
    return int(found) * 16 // data.element_size()


def _restore(data: torch.Tensor, held: torch.Tensor) -> None:
    """Give what still has the mark its old content back, or zeros where that was not kept."""
    same = held.shape == data.shape and held.dtype == data.dtype
    if (mark := _MARKS.get(data.dtype)) is not None:
        bits = data.view(mark[0])
        where = bits == _signed(*mark)
        bits[where] = held.view(mark[0])[where] if same else 0
        return
    blocks = _blocks(data)
    assert blocks is not None
    where = (blocks[:, 0] == _BLOCK[0]) & (blocks[:, 1] == _BLOCK[1])
    old = _blocks(held) if same else None
    blocks[where] = old[where] if old is not None else 0


def _blocks(data: torch.Tensor) -> torch.Tensor | None:
    """An integer tensor's bytes as int64 [blocks, 2]; None where it has no whole block."""
    raw = data.view(torch.uint8).flatten() if data.dtype != torch.bool else None
    if raw is None or len(raw) < 16 or data.data_ptr() % 8:
        return None
    return raw[: len(raw) // 16 * 16].view(torch.int64).view(-1, 2)


def _signed(kind: torch.dtype, bits: int) -> int:
    info = torch.iinfo(kind)
    return bits if bits <= info.max else bits - (1 << info.bits)


# Tensors that note their use ------------------------------------------------------------------------
_LOOKS = {
    "shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_meta", "is_sparse", "requires_grad",
    "is_quantized", "size", "dim", "numel", "stride", "element_size", "nbytes", "itemsize",
    "is_contiguous", "is_floating_point", "is_complex", "__len__", "storage_offset", "is_cpu", "names",
}  # fmt: skip


class _Watched(torch.Tensor):
    """A tensor of the checkpoint which notes the first operation that takes it. What operations return
    are plain tensors; asking for its shape or dtype is no use of it."""

    _used: Callable[[], None]

    @classmethod
    def of(cls, tensor: torch.Tensor, used: Callable[[], None]) -> "_Watched":
        watched = tensor.as_subclass(cls)
        watched._used = used
        return watched

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        looks = _name_of(func) in _LOOKS

        def plain(value: Any) -> Any:
            if isinstance(value, cls):
                if not looks:
                    value._used()
                return value.as_subclass(torch.Tensor)
            if isinstance(value, list | tuple):
                return type(value)(map(plain, value)) if type(value) in (list, tuple) else value
            return value

        with torch._C.DisableTorchFunctionSubclass():
            return func(*map(plain, args), **{k: plain(v) for k, v in (kwargs or {}).items()})


def _name_of(func: Any) -> str:
    name = getattr(func, "__name__", "")
    if name == "__get__":  # a property of the tensor
        return getattr(func.__self__, "__name__", "")
    return name


def watched_loading(audit: WeightAudit) -> Any:
    """A context within which SGLang's common loader loads through the audit."""
    return compat.loading_through(audit.load)
