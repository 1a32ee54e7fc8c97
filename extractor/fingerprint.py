"""What a stored number depends on, by name, so that a folder of another run can be refused with the
reason. World size, batch budget, paths and threads are not in it: they may change between runs."""

import json
from collections.abc import Mapping

import xxhash

from extractor.config import ExtractConfig
from extractor.layouts import Layout
from extractor.model import ModelSpec


def parts(
    config: ExtractConfig, spec: ModelSpec, layout: Layout, dtype: str, data: Mapping[str, str]
) -> dict[str, str]:
    """Name to a short value or digest; data comes from the prepared store."""
    return {
        "model": spec.digest,
        "architecture": spec.architecture,
        "layers": ",".join(layout.stored),
        "dtype": dtype,
        "layout": config.layout,
        **({"topk_logits": str(layout.topk)} if layout.topk else {}),
        **{f"data: {name}": value for name, value in data.items()},
    }


def digest(parts: Mapping[str, str]) -> str:
    return xxhash.xxh3_128(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What differs, one phrase each."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return [
        f"{name}: {before.get(name, 'absent')} then, {now.get(name, 'absent')} now"
        for name in names
    ]
