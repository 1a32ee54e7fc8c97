"""Names of states: from what a user asks to 0-based layers, `embed` and `final`."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from extractor.errors import UsageError

EMBED, FINAL = "embed", "final"


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
            if not name.isdigit():
                raise UsageError(f"--layers: {name!r} is neither a layer number nor embed or final")
            if int(name) >= self.num_layers:
                raise UsageError(
                    f"--layers: layer {name} is past the end: this model's layers are 0 to "
                    f"{self.num_layers - 1} (docs/formats.md, Layer numbers)"
                )

    @property
    def layers(self) -> tuple[int, ...]:
        """The numbered ones, in the order asked."""
        return tuple(int(name) for name in self.names if name.isdigit())

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


def _names(layers: str, n: int) -> list[str]:
    kind, _, rest = layers.partition(":")
    if layers == "eagle3":
        # EAGLE-3's [2, n//2, n-3] counts from the embedding; as 0-based layers that is one less.
        return [str(max(k, 0)) for k in (1, n // 2 - 1, n - 4)]
    if kind == "dflash":
        if not rest.isdigit() or int(rest) < 1:
            raise UsageError(f"--layers {layers}: wanted dflash:K with K of 1 or more")
        k = int(rest)
        if k == 1:
            return [str(n // 2)]
        # DFlash's own default: K layers evenly from 1 to n-3, rounded.
        return [str(max(round(1 + i * (n - 4) / (k - 1)), 0)) for i in range(k)]
    if kind == "draft":
        return _from_drafter(Path(rest))
    return [part.strip() for part in layers.split(",") if part.strip()]


def _from_drafter(path: Path) -> list[str]:
    """Layers out of a drafter's config.json, each project's numbers turned into ours."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"--layers draft:{path}: {error}") from error
    # speculators counts as vLLM does: "output of layer j" is j+1.
    shift = 1 if "speculators_model_type" in config else 0
    places = (config, config.get("eagle_config"), config.get("dflash_config"))
    keys = ("eagle_aux_hidden_state_layer_ids", "target_layer_ids", "aux_hidden_state_layer_ids")
    for place in places:
        for key in keys:
            ids = place.get(key) if isinstance(place, dict) else None
            if isinstance(ids, list) and ids:
                return [EMBED if i < shift else str(i - shift) for i in map(int, ids)]
    raise UsageError(f"--layers draft:{path}: none of {', '.join(keys)} is in it")
