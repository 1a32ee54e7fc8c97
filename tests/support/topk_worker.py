"""Run under torchrun: an engine with top-k logits, against transformers' log_softmax of the same ids.

    torchrun --nproc-per-node TP -m tests.support.topk_worker MODEL K [DEVICE [KEY=VALUE ...]]

Prints a line "TOPK {...}": the largest differences over all tokens, and what refused a wrapper that was
made to differ. The second batch is one sample longer than the token budget. Exit code 1 when
tests/support/topk_judge.py complains.
"""

import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from extractor.engine import compat, topk
from extractor.engine import sglang as engine
from extractor.errors import RunError
from extractor.model import ModelSpec
from extractor.ranks.place import Place
from extractor.ranks.world import World
from extractor.records import IDS, LOGPROBS, Batch
from extractor.states import States
from tests.support.topk_judge import complaints

topk.CHUNK_BYTES = 1 << 21  # so that ten or twenty tokens are a chunk, and a batch several
LENGTHS, BUDGET = (21, 5, 1), 64
LONG = 2 * BUDGET + 7


def main() -> None:
    model, k = sys.argv[1], int(sys.argv[2])
    place = Place.from_environment(None)
    device = engine.choose_device(sys.argv[3] if len(sys.argv) > 3 else "cpu", place)
    engine.prepare_process(device, place)
    world = World(place)
    spec = ModelSpec.read(model)
    world.join_replica(device)
    options = engine.EngineOptions(
        device=device,
        max_tokens=BUDGET,
        max_sequences=8,
        longest=LONG,
        sglang_args=dict(item.split("=", 1) for item in sys.argv[4:]),
        topk=k,
    )
    states = States(("0",), spec.num_layers)
    runner = engine.SGLangEngine(spec, states, place, options)
    runner.self_check()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, spec.vocab_size, (sum(LENGTHS) + LONG,), generator=generator)
    batch = Batch(0, LENGTHS, ids[: sum(LENGTHS)])
    long = Batch(1, (LONG,), ids[sum(LENGTHS) :])
    seen = [(runner.forward(each).states, each) for each in (batch, long)]
    refusals = refuse(runner, place)
    wrong: list[str] = []
    if place.rank == 0:
        reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        line = {
            "found": [compare(states, each, reference) for states, each in seen],
            "refusals": refusals,
            "compute_dtype": runner.info.details["compute_dtype"],
        }
        print("TOPK", json.dumps(line), flush=True)
        wrong = complaints(line, k)
    world.leave()
    if wrong:
        sys.exit("; ".join(wrong))


@torch.no_grad()
def compare(states: Any, batch: Batch, model: Any) -> dict[str, Any]:
    assert tuple(states) == ("0", LOGPROBS, IDS)
    logprobs, ids = states[LOGPROBS].cpu(), states[IDS].cpu()
    assert logprobs.dtype == torch.float32 and ids.dtype == torch.int32
    wanted = torch.cat(
        [
            model(input_ids=part.unsqueeze(0)).logits[0].float().log_softmax(-1)
            for part in batch.input_ids.split(list(batch.lengths))
        ]
    )
    best = wanted.topk(logprobs.shape[1], dim=-1)
    return {
        "shape": list(logprobs.shape),
        "repeated": sum(len(set(row)) != len(row) for row in ids.tolist()),
        "of_ids": float((logprobs - wanted.gather(-1, ids.long())).abs().max()),
        "of_ranks": float((logprobs - best.values).abs().max()),
        "first_alike": float((ids[:, 0] == best.indices[:, 0]).float().mean()),
    }


def refuse(runner: engine.SGLangEngine, place: Place) -> list[str]:
    """What is said of a wrapper that changes the state, and of one that changes the logits."""
    kind = compat.symbol("sglang.srt.layers.logits_processor", "LogitsProcessor")
    said: list[str] = []
    hook = runner._backbone.register_forward_hook(lambda _m, _a, output: output * 2)
    said.append(complaint(runner, place))
    hook.remove()
    plain = kind._get_logits
    kind._get_logits = lambda *args, **kwargs: plain(*args, **kwargs) * 2
    said.append(complaint(runner, place))
    kind._get_logits = plain
    return said


def complaint(runner: engine.SGLangEngine, place: Place) -> str:
    try:
        runner._make_topk(place)
    except RunError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main()
