"""What a stored number depends on, by name, so that a folder of another run can be refused with the
reason. World size, batch budget, paths and threads are not in it: they may change between runs."""

import json
from collections.abc import Callable, Mapping

import xxhash

from extractor.config import ExtractConfig, key_value
from extractor.layouts import Layout
from extractor.model import ModelSpec
from extractor.output.run_json import Run

COMPUTED_IN = "computed in"
SGLANG = "sglang "
"""Begins the name of a part that a --sglang field is."""

DTYPE = f"{SGLANG}dtype"
QUANTIZATION = "quantization files"


def parts(
    config: ExtractConfig,
    spec: ModelSpec,
    layout: Layout,
    dtype: str,
    data: Mapping[str, str],
    *,
    computed_in: str,
    given: Mapping[str, str],
) -> dict[str, str]:
    """Name to a short value or digest.

    Args:
        data: parts of the prepared store.
        computed_in: the dtype that the model computes in, by name.
        given: --sglang fields that can change a number, and their values in one spelling."""
    return {
        "model": spec.digest,
        "architecture": spec.architecture,
        **({QUANTIZATION: spec.quantization} if spec.quantization else {}),
        "layers": ",".join(layout.stored),
        "dtype": dtype,
        "layout": config.layout,
        **({"topk_logits": str(layout.topk)} if layout.topk else {}),
        COMPUTED_IN: computed_in,
        **_named(given),
        **{f"data: {name}": value for name, value in data.items()},
    }


def parts_of_run(
    run: Run,
    now: Mapping[str, str],
    spell: Callable[[dict[str, str]], Mapping[str, str]],
) -> dict[str, str]:
    """The parts of an earlier run, by its run.json. One of a version that left the engine's settings out
    has these from what else it says of itself; what it does not say is taken to be as now.

    spell: --sglang fields, as text, to those that can change a number."""
    then = dict(run.parts)
    if COMPUTED_IN in then:
        return then
    given = (run.config or {}).get("sglang") or ()
    then |= _named(spell(dict(key_value(item, "--sglang") for item in given)))
    computed = (run.engine or {}).get("compute_dtype") or now.get(COMPUTED_IN)
    unsaid = {COMPUTED_IN: computed, QUANTIZATION: now.get(QUANTIZATION)}
    return then | {name: value for name, value in unsaid.items() if value}


def _named(given: Mapping[str, str]) -> dict[str, str]:
    return {f"{SGLANG}{name}": value for name, value in given.items()}


def digest(parts: Mapping[str, str]) -> str:
    return xxhash.xxh3_128(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What differs, one phrase each. How the dtype that is computed in came to be is no difference."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if COMPUTED_IN not in names and COMPUTED_IN in before:
        names = [name for name in names if name != DTYPE]
    return [
        f"{name}: {before.get(name, 'absent')} then, {now.get(name, 'absent')} now"
        for name in names
    ]
