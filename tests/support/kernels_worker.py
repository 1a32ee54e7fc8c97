"""Run under torchrun: the states of a model before and after our kernels take the place of SGLang's.

    TRITON_INTERPRET=1 torchrun --nproc-per-node 1 -m tests.support.kernels_worker MODEL

Prints a line "KERNELS {...}": in how many layers they do, and the largest relative difference of any
state, of samples in one pass and of one in chunks. On a CPU, where Triton's interpreter runs them.
"""

import json
import sys

import torch

from extractor.engine import sglang as engine
from extractor.model import ModelSpec
from extractor.ranks.place import Place
from extractor.ranks.world import World
from extractor.records import Batch
from extractor.states import States
from tests.support.parity_worker import apart, kept

LENGTHS, BUDGET = (11, 1, 6), 24
LONG = BUDGET + 7


def main() -> None:
    place = Place.from_environment(None)
    device = engine.choose_device("cpu", place)
    engine.prepare_process(device, place)
    world = World(place)
    spec = ModelSpec.read(sys.argv[1])
    world.join_replica(device)
    options = engine.EngineOptions(
        device=device,
        max_tokens=BUDGET,
        max_sequences=8,
        longest=LONG,
        # Whatever this CPU's own is: in bfloat16 the interpreter's rounding would hide all else.
        sglang_args={"dtype": "float32"},
    )
    every = (*map(str, range(spec.num_layers)), "embed")
    states = States.resolve(",".join(every), True, spec.num_layers)
    runner = engine.SGLangEngine(spec, states, place, options)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, spec.vocab_size, (sum(LENGTHS) + LONG,), generator=generator)
    batches = (
        Batch(0, LENGTHS, ids[: sum(LENGTHS)]),
        Batch(1, (LONG,), ids[sum(LENGTHS) :]),
    )
    before = [kept(runner.forward(batch).states) for batch in batches]

    from extractor.engine.qk_norm_rope import install

    layers = install(runner._backbone)
    after = [kept(runner.forward(batch).states) for batch in batches]
    line = {
        "layers": layers,
        "apart": [apart(new, old) for new, old in zip(after, before, strict=True)],
    }
    print("KERNELS", json.dumps(line), flush=True)
    world.leave()


if __name__ == "__main__":
    main()
