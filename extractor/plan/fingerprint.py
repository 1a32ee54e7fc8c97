"""The fingerprint of a run: the settings that the stored values depend on, by name.

A run refuses a folder that another run has written with another fingerprint, and names the difference.
World size, batch budget, paths and threads are not part of it, because they may change between runs.
"""

import json
from collections.abc import Callable, Mapping

import xxhash

from extractor.config import ExtractConfig, key_value
from extractor.layouts import Layout
from extractor.model import ModelSpec
from extractor.output.run_json import Run

COMPUTED_IN = "computed in"
SGLANG = "sglang "
"""The prefix of a part's name that comes from a --sglang field."""

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
    """The parts of the fingerprint: a name to a short value or digest.

    Args:
        dtype: name of the dtype of the stored states.
        data: the parts of the prepared store.
        computed_in: name of the dtype in which the model computes.
        given: the --sglang fields that can change a stored value, with their values in one spelling."""
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
    """The parts of an earlier run, from its run.json.

    Some versions of the program do not store the engine's settings among the parts. These parts are
    then made from the other fields of run.json; what no field says is taken to be as in this run.

    now: the parts of this run. spell: takes --sglang fields as text and returns those that can change a
    stored value, with their values in one spelling."""
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
    """The fingerprint as one hash: XXH3 (128 bits, in hex) of the parts as sorted JSON."""
    return xxhash.xxh3_128(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The parts that differ, one phrase per part.

    When both runs compute in the same dtype, a difference in `--sglang dtype` does not count."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if COMPUTED_IN not in names and COMPUTED_IN in before:
        names = [name for name in names if name != DTYPE]
    return [
        f"{name}: {before.get(name, 'absent')} then, {now.get(name, 'absent')} now"
        for name in names
    ]
