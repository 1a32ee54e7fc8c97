"""Run under torchrun: what the start-up proof says of a model, with some of the engine's own care off.

    torchrun --nproc-per-node TP -m tests.support.proof_worker MODEL LONGEST [without-rope|without-audit]

Prints a line "PROOF {...}" on rank 0: the proof, or the error's text. Without the rope by sample, or the
audit of weights, the proof has to find by itself what these would have mended or refused.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from extractor.engine import sglang as engine
from extractor.engine import weights
from extractor.engine.base import EngineOptions
from extractor.errors import RunError
from extractor.model import ModelSpec
from extractor.ranks.place import Place
from extractor.ranks.world import World
from extractor.states import States


class NoRope:
    found = 0

    def __init__(self, _: Any) -> None: ...


def main() -> None:
    model, longest, *without = sys.argv[1:]
    spec, place, device = ModelSpec.read(model), Place.from_environment(None), torch.device("cpu")
    engine.prepare_process(device, place)
    world = World(place)
    world.join_replica(device)
    if "without-rope" in without:
        engine.SampleRope = NoRope  # type: ignore[assignment]
    if "without-audit" in without:
        weights.WeightAudit.settle = lambda *_: "off"  # type: ignore[assignment]
    options = EngineOptions(
        device=device,
        max_tokens=512,
        max_sequences=16,
        longest=int(longest),
        # GPT-OSS runs in bfloat16 alone.
        sglang_args={} if spec.architecture.startswith("GptOss") else {"dtype": "float32"},
    )
    try:
        built = engine.build(spec, States(("1", "final"), spec.num_layers), place, options)
        found = built.layer_proof()
        result: dict[str, Any] = asdict(found) if found else {}
    except RunError as error:
        result = {"error": str(error)}
    if place.rank == 0:
        print("PROOF", json.dumps({**result, "model": Path(model).name}), flush=True)
    world.leave()


if __name__ == "__main__":
    main()
