"""What --dtype float8_e4m3fn costs in precision: `python benchmarks/measure_float8.py OUT`.

OUT is a folder stored as bfloat16. Each state is encoded as the program would, with a scale a token,
read back as the Dataset does in float32, and compared. Over all tokens of all samples:

- `rms`: root mean square of the error over that of the values;
- `median`, `worst`: of a token's relative error, |error| / |state| (Euclidean norms);
- `cosine`: the smallest cosine between a token's state and its copy;
- `zeroed`: share of values that are not zero and come back as zero, which is what an outlier in the same
  token does to its small values;
- `outlier`: the largest magnitude in a token over the token's root mean square, median over tokens.

`together` is speculators' form of the same: one scale a token over all of the states side by side. The
last line is JSON.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from extractor.dataset import HiddenStates
from extractor.layouts.planes import FP8, Plane, encode
from extractor.layouts.safetensors import unscale


def coded(value: torch.Tensor) -> torch.Tensor:
    """Through float8 and back, float32."""
    planes = (
        Plane("x", ("x",), FP8, value.shape[-1]),
        Plane("s", ("x",), torch.float32, 0, scale_of="x"),
    )
    stored = encode(planes, {"x": value})
    return unscale(stored["x"], stored["s"], torch.float32)


def measure(value: torch.Tensor, copy: torch.Tensor) -> dict[str, float]:
    """value, copy: [tokens, H]."""
    wide = value.float()
    error = copy - wide
    relative = error.norm(dim=-1) / wide.norm(dim=-1).clamp(min=1e-12)
    outlier = wide.abs().amax(dim=-1) / wide.square().mean(dim=-1).sqrt().clamp(min=1e-12)
    return {
        "rms": float(error.square().mean().sqrt() / wide.square().mean().sqrt()),
        "median": float(relative.median()),
        "worst": float(relative.max()),
        "cosine": float(torch.cosine_similarity(copy, wide, dim=-1).min()),
        "zeroed": float(((copy == 0) & (wide != 0)).float().mean()),
        "outlier": float(outlier.median()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    data = HiddenStates(parser.parse_args().output)
    items = [data[i] for i in range(len(data))]
    names = list(data.states)
    states = {name: torch.cat([item[name] for item in items]) for name in names}
    rows = {
        name.removeprefix("hidden_states."): measure(state, coded(state))
        for name, state in states.items()
    }
    together = coded(torch.cat(list(states.values()), dim=-1)).chunk(len(names), dim=-1)
    shared = {
        f"{name.removeprefix('hidden_states.')}, together": measure(state, copy)
        for (name, state), copy in zip(states.items(), together, strict=True)
    }
    print(f"{data.tokens:,} tokens of {len(data)} samples, {data.run['model']['path']}\n")
    print("| state | rms | median | worst | cosine | zeroed | outlier |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, row in {**rows, **shared}.items():
        values = [f"{row[k]:.2%}" for k in ("rms", "median", "worst")]
        values += [f"{row['cosine']:.5f}", f"{row['zeroed']:.2%}", f"{row['outlier']:.0f}"]
        print(f"| {name} | {' | '.join(values)} |")
    print(json.dumps({"tokens": data.tokens, "states": {**rows, **shared}}))


if __name__ == "__main__":
    main()
