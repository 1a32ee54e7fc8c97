"""Names of states: from what a user asks to 0-based layers, `embed` and `final`."""

import json
import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from extractor.errors import UsageError

EMBED, FINAL = "embed", "final"

# What drafters' configs call their target's layers: EAGLE-3 of SpecForge and ModelOpt, DFlash of z-lab,
# speculators.
DRAFTER_KEYS = (
    "eagle_aux_hidden_state_layer_ids",
    "target_layer_ids",
    "aux_hidden_state_layer_ids",
)


@dataclass(frozen=True, slots=True)
class States:
    """Which states to keep, in the order asked.

    State "k" is the residual stream after 0-based decoder layer k; "embed" is the stream before
    layer 0; "final" is after the final norm, what lm_head reads. In transformers' numbers these are
    hidden_states[k+1], [0] and [-1] (whose last entry is normed already).
    """

    names: tuple[str, ...]
    num_layers: int

    def __post_init__(self) -> None:
        if not self.names:
            raise UsageError(
                "--layers names no state, and --no-final leaves none: nothing to write"
            )
        twice = [name for name, count in Counter(self.names).items() if count > 1]
        if twice:
            raise UsageError(
                f"layers {', '.join(self.names)}: {twice[0]} appears twice; "
                "name each once, such as --layers 1,2,3"
            )
        for name in self.names:
            if name in (EMBED, FINAL):
                continue
            if not _is_layer(name):
                raise UsageError(f"--layers: {name!r} is neither a layer number nor embed or final")
            if int(name) >= self.num_layers:
                raise UsageError(
                    f"--layers: layer {name} is past the end: this model's layers are 0 to "
                    f"{self.num_layers - 1} (docs/formats.md, Layer numbers)"
                )

    @property
    def layers(self) -> tuple[int, ...]:
        """The numbered ones, in the order asked."""
        return tuple(int(name) for name in self.names if _is_layer(name))

    def __len__(self) -> int:
        return len(self.names)

    def __str__(self) -> str:
        return ",".join(self.names)

    @classmethod
    def resolve(cls, layers: str, final: bool, num_layers: int) -> "States":
        """--layers and --final for a model of num_layers. Raises UsageError."""
        names = tuple(_names(layers.strip(), num_layers))
        if final and FINAL not in names:
            names += (FINAL,)
        try:
            return cls(names, num_layers)
        except UsageError as error:
            kind = layers.partition(":")[0]
            if kind in ("eagle3", "dflash", "draft"):
                raise UsageError(
                    f"--layers {layers} on a model of {num_layers} layers: {error}"
                ) from None
            raise


def _is_layer(name: str) -> bool:
    """A whole number as it is written in a file's keys: no 07, no digits of other scripts."""
    return re.fullmatch("0|[1-9][0-9]{0,8}", name) is not None


def _names(layers: str, n: int) -> list[str]:
    kind, _, rest = layers.partition(":")
    if layers == "eagle3":
        # EAGLE-3's [2, n//2, n-3] counts from the embedding; as 0-based layers that is one less.
        return [str(max(k, 0)) for k in (1, n // 2 - 1, n - 4)]
    if kind == "dflash":
        if not _is_layer(rest) or not 1 <= int(rest) <= n:
            raise UsageError(f"--layers {layers}: wanted dflash:K with K from 1 to {n}")
        k = int(rest)
        if k == 1:
            return [str(n // 2)]
        # DFlash's own default: K layers evenly from 1 to n-3, rounded.
        return [str(max(round(1 + i * (n - 4) / (k - 1)), 0)) for i in range(k)]
    if kind == "draft":
        return _from_drafter(rest)
    return [part.strip() for part in layers.split(",") if part.strip()]


def _from_drafter(place: str) -> list[str]:
    """Layers out of a drafter's config.json, each project's numbers turned into ours. UsageError."""
    config = _drafter_config(place)
    # speculators counts as vLLM does: "output of layer j" is j+1, and 0 is the embedding.
    shift = 1 if "speculators_model_type" in config else 0
    places = (config, config.get("eagle_config"), config.get("dflash_config"))
    for where in places:
        for key in DRAFTER_KEYS:
            ids = where.get(key) if isinstance(where, dict) else None
            if ids is None or ids == []:
                continue
            if not _are_layers(ids):
                raise UsageError(
                    f"--layers draft:{place}: {key} is {_cut(ids)}: wanted a list of whole numbers"
                )
            return [EMBED if i < shift else str(i - shift) for i in ids]
    raise UsageError(
        f"--layers draft:{place}: none of {', '.join(DRAFTER_KEYS)} is in it; a drafter of EAGLE-3's "
        "default layers has none: use --layers eagle3"
    )


def _drafter_config(place: str) -> dict[str, Any]:
    path = Path(os.path.expanduser(place))  # noqa: PTH111  (an unknown user stays as it is)
    file = path / "config.json" if path.is_dir() else path
    if not place or not file.is_file():
        raise UsageError(f"--layers draft:{place}: wanted a drafter's folder, or its config.json")
    try:
        config: Any = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        what = getattr(error, "strerror", None) or "is no JSON"
        raise UsageError(f"--layers draft:{place}: {file.name}: {what}") from error
    if not isinstance(config, dict):
        raise UsageError(f"--layers draft:{place}: {file.name}: wanted a JSON object")
    return config


def _are_layers(ids: Any) -> bool:
    return isinstance(ids, list) and all(
        isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 10**9 for i in ids
    )


def _cut(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
