"""Which tile SGLang's Triton experts should multiply in, for passes as long as ours.

    python -m benchmarks.bench_moe --shape deepseek-v2-lite --tokens 4096,16384,65536
    python -m benchmarks.bench_moe --set n_routed_experts=128 --set num_experts_per_tok=8

Passes of a shape cut to a few layers, with each tile in turn, SGLang's own choice (null) first; dummy
weights, whose routers spread tokens about evenly. Milliseconds a mixture-of-experts layer, the rest of
the layer included, and how far the tile moves the state after the first such layer: the median token's
relative difference. JSON last. A tile that the GPU's shared memory is too small for is named so.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_extract import bare_pass
from benchmarks.shapes import SHAPES, write_shape
from extractor.engine import compat
from extractor.engine import sglang as engine_sglang
from extractor.engine.base import EngineOptions
from extractor.model import ModelSpec
from extractor.ranks.place import Place
from extractor.ranks.world import World
from extractor.records import Batch
from extractor.states import States
from extractor.verbs.reference import median

# rows of tokens x columns x depth, groups of row blocks, warps, stages
TILES = [
    (128, 128, 64, 8, 8, 3),
    (128, 128, 64, 16, 4, 4),
    (128, 256, 64, 1, 8, 3),
    (128, 256, 64, 1, 8, 4),
    (128, 256, 64, 8, 8, 3),
    (128, 256, 64, 16, 8, 4),
    (128, 256, 64, 32, 8, 4),
    (256, 128, 64, 8, 8, 3),
    (256, 128, 64, 16, 8, 4),
    (64, 256, 64, 16, 8, 4),
    (64, 128, 64, 16, 4, 4),
]

OURS = tuple(compat.EXPERT_TILE.values())


def tile_config(tile: tuple[int, ...]) -> dict[str, int]:
    return dict(zip(compat.EXPERT_TILE, tile, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="deepseek-v2-lite")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=NUMBER", dest="changes")
    parser.add_argument("--layers", type=int, default=4, help="of which the first may be dense")
    parser.add_argument("--tokens", default="4096,16384,65536", help="of passes, as a list")
    parser.add_argument("--length", type=int, default=1024, help="of a sequence")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ours", action="store_true", help="the program's own tile only")
    parser.add_argument("--sglang", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="bench-moe-"))
    try:
        result = run(args, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(json.dumps(result))


def run(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    place = Place.from_environment(None)
    device = engine_sglang.choose_device("cuda", place)
    engine_sglang.prepare_process(device, place)
    world = World(place)
    world.join_replica(device)
    model = write_shape(args.shape, work)
    config = json.loads((model / "config.json").read_text()) | {"num_hidden_layers": args.layers}
    config |= {key: int(value) for key, _, value in (c.partition("=") for c in args.changes)}
    (model / "config.json").write_text(json.dumps(config))
    dense = config.get("first_k_dense_replace", 0)
    spec = ModelSpec.read(str(model))
    counts = [int(count) for count in args.tokens.split(",")]
    given = dict(item.split("=", 1) for item in args.sglang)
    engine = engine_sglang.SGLangEngine(
        spec,
        States((str(dense),), spec.num_layers),
        place,
        EngineOptions(
            device=device,
            max_tokens=max(counts),
            max_sequences=max(counts) // args.length + 1,
            longest=args.length,
            sglang_args={"load_format": "dummy"} | given,
            as_sglang=True,
        ),
    )
    passes: list[dict[str, Any]] = []
    for count in counts:
        lengths = (args.length,) * (count // args.length)
        ids = torch.randint(0, spec.vocab_size, (sum(lengths),))
        batch, stock = Batch(0, lengths, ids), None
        for tile in (None, *([OURS] if args.ours else TILES)):
            found: dict[str, Any] = {"tokens": batch.num_tokens, "tile": tile}
            try:
                with compat.expert_tile(tile_config(tile) if tile else None):
                    state = first_state(engine, batch)
                    stock = state if stock is None else stock
                    seconds = [bare_pass(engine, batch, device)[1] for _ in range(args.repeats)]
            except Exception as error:  # Triton's own kinds, which differ by release
                found["failed"] = (str(error).splitlines() or [repr(error)])[0][:200]
            else:
                layers = args.layers - dense
                found["ms_a_layer"] = round(1e3 * statistics.median(seconds) / layers, 3)
                found["apart"] = median(state, stock)
            passes.append(found)
            print(found, flush=True)
    world.leave()
    return {
        "benchmark": "bench_moe",
        "shape": args.shape,
        "changes": args.changes,
        "device": torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d"),
        "layers": args.layers,
        "engine": engine.info.details,
        "passes": passes,
    }


def first_state(engine: engine_sglang.SGLangEngine, batch: Batch) -> torch.Tensor:
    """The state after the first mixture-of-experts layer; compiles what the tile needs."""
    (state,) = engine.forward(batch).states.values()
    return state.float()


if __name__ == "__main__":
    main()
