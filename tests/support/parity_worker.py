"""Run under torchrun: one engine, several choices of layers, every state judged by transformers.

    torchrun --nproc-per-node TP -m tests.support.parity_worker MODEL DEVICE SPECS_JSON [KEY=VALUE ...]

Prints a line "PARITY {...}" for each choice. A last sample is longer than the token budget, and samples
of lengths around it run in chunks and in one pass.
EXTRACTOR_PARITY_STATES names a file to save the states of the last choice's short samples in, for
docs/families.py to compare two runs.
"""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from extractor.engine import sglang as engine
from extractor.model import ModelSpec
from extractor.ranks.place import Place
from extractor.ranks.world import World
from extractor.records import Batch
from extractor.states import States

LENGTHS = (21, 65, 1, 2)
BUDGET = 128
LONG = 3 * BUDGET + 7
# Samples by themselves, in chunks of the budget against one pass.
EDGES = (1, 2, BUDGET - 1, BUDGET, BUDGET + 1, 2 * BUDGET, 2 * BUDGET + 1, LONG)


def apart(states: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    """The largest relative difference of any state from the one wanted; not a number if one is not."""
    assert states.keys() == wanted.keys()
    differences: list[torch.Tensor] = []
    for name, state in states.items():
        want = wanted[name].float()
        assert state.shape == want.shape, (name, state.shape, want.shape)
        differences.append((state.float() - want).norm() / want.norm())
    return float(torch.stack(differences).max())


def kept(states: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: state.clone(memory_format=torch.contiguous_format) for name, state in states.items()
    }


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def difference_alone(
    runner: engine.SGLangEngine, batch: Batch, together: dict[str, torch.Tensor]
) -> float:
    """The largest relative difference of any sample's state when the sample runs by itself. All tp
    ranks call it together."""
    differences: list[float] = []
    for begin, end in zip(batch.offsets, batch.offsets[1:], strict=False):
        ids = batch.input_ids[begin:end]
        alone = runner.forward(Batch(2, (len(ids),), ids)).states
        rows = {name: state[begin:end] for name, state in together.items()}
        differences.append(apart(alone, rows))
    return float(torch.tensor(differences).max())


def difference_in_chunks(runner: engine.SGLangEngine, ids: torch.Tensor) -> float:
    """The largest relative difference of any state of a sample of any length of EDGES from the same
    sample in one pass. All tp ranks call it together."""
    differences: list[float] = []
    for length in EDGES:
        batch = Batch(3, (length,), ids[:length])
        chunked = kept(runner.forward(batch).states)
        assert all(len(state) == length for state in chunked.values())
        runner._longest_pass = LONG
        differences.append(apart(chunked, runner.forward(batch).states))
        runner._longest_pass = BUDGET
    return float(torch.tensor(differences).max())


def difference_when_short_of_memory(
    runner: engine.SGLangEngine, batch: Batch, together: dict[str, torch.Tensor]
) -> float:
    """The largest relative difference of any state of a batch when the device has no memory for more
    than half of it. For a replica of one rank."""
    whole_pass = runner._pass

    def short(forward_batch: Any) -> None:
        whole_pass(forward_batch)
        if len(forward_batch.input_ids) > batch.num_tokens // 2:
            raise torch.OutOfMemoryError("CUDA out of memory.\nSo much was wanted.")

    runner._pass = short
    states = runner.forward(batch).states
    assert runner._longest_pass == batch.num_tokens // 2
    runner._pass, runner._longest_pass = whole_pass, BUDGET
    return apart(states, together)


def ordinary_ids(model: Path, count: int, vocab: int) -> torch.Tensor:
    """Ids of ordinary text, so that real weights see what they know; of a model without a tokenizer,
    random ones."""
    if not (model / "tokenizer.json").is_file():
        return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(0))
    text = Path(__file__).with_name("prose.txt").read_text()
    ids = AutoTokenizer.from_pretrained(model)(text, add_special_tokens=False).input_ids
    return torch.tensor(ids[:count])


class FusedCalls:
    """Counts how often SGLang's fused all-reduce ran to its end: a model, or a pass, may not use it."""

    def __init__(self) -> None:
        from sglang.srt.layers import flashinfer_comm_fusion as module

        self.count = 0
        inner = module.flashinfer_allreduce_residual_rmsnorm

        def counted(*args: Any, **kwargs: Any) -> Any:
            result = inner(*args, **kwargs)
            self.count += result[0] is not None
            return result

        module.flashinfer_allreduce_residual_rmsnorm = counted


def main() -> None:
    model, device_name, specs = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    sglang_args = dict(item.split("=", 1) for item in sys.argv[4:])
    place = Place.from_environment(None)
    device = engine.choose_device(device_name, place)
    engine.prepare_process(device, place)
    world = World(place)
    spec = ModelSpec.read(model)
    engine.check_model(spec, place, sglang_args)
    world.join_replica(device)
    options = engine.EngineOptions(
        device=device,
        max_tokens=BUDGET,
        max_sequences=8,
        longest=LONG,
        sglang_args=sglang_args,
    )
    first = States.resolve(specs[0], True, spec.num_layers)
    runner = engine.SGLangEngine(spec, first, place, options)
    fused = FusedCalls() if "flashinfer_allreduce_fusion_backend" in sglang_args else None
    pool = ordinary_ids(Path(model), sum(LENGTHS) + LONG, spec.vocab_size)
    batch = Batch(0, LENGTHS, pool[: sum(LENGTHS)])
    long = Batch(1, (LONG,), pool[sum(LENGTHS) :])
    reference = None
    if place.rank == 0:
        from tests.support.quantized_reference import reference_of

        reference = reference_of(Path(model), str(device))
    for text in specs:
        states = States.resolve(text, True, spec.num_layers)
        runner.mark(states)
        proof = runner.self_check()
        results = []
        for each in (batch, long):
            captured = runner.forward(each)
            assert tuple(captured.states) == states.names
            again = runner.forward(each)
            equal = all(
                torch.equal(captured.states[name], again.states[name]) for name in states.names
            )
            if reference is None:
                continue
            for begin, end in zip(each.offsets, each.offsets[1:], strict=False):
                part = {name: state[begin:end] for name, state in captured.states.items()}
                judged = reference.judge(each.input_ids[begin:end], part)
                results += [{**asdict(j), "good": j.good, "repeats": equal} for j in judged]
        together = kept(runner.forward(batch).states)
        alone = difference_alone(runner, batch, together)
        chunked = difference_in_chunks(runner, long.input_ids)
        halved = difference_when_short_of_memory(runner, batch, together) if place.tp == 1 else 0.0
        if reference is not None:
            line = {
                "layers": text,
                "results": results,
                "self_check": asdict(proof),
                "alone": alone,
                "chunked": chunked,
                "halved": halved,
                "dtypes": sorted({dtype_name(state.dtype) for state in together.values()}),
                # A CPU may compute in a wider one; a GPU never in another than the model's own.
                "dtype": spec.dtype if device.type == "cuda" else dtype_name(runner.info.dtype),
                "engine": runner.info.details,
                "fused_calls": fused.count if fused else 0,
            }
            print("PARITY", json.dumps(line), flush=True)
            if "EXTRACTOR_PARITY_STATES" in os.environ:
                save_file(together, os.environ["EXTRACTOR_PARITY_STATES"])
    world.leave()


if __name__ == "__main__":
    main()
