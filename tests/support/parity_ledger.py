"""What parity runs found, a line a run, for docs/families.py to make its table from."""

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def summary(model: str, ranks: int, device: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    """One run's line. found: what parity_worker printed, one entry a choice of layers."""
    results = [item for entry in found for item in entry["results"]]
    long = [item for item in results if item["tokens"] >= 8]
    return {
        "model": model,
        "tp": ranks,
        "ep": found[0]["engine"]["ep"],
        "device": device,
        "date": datetime.now(UTC).date().isoformat(),
        **{key: found[0]["engine"][key] for key in ENGINE},
        "states": sorted({item["name"] for item in results}, key=_order),
        "checked": len(results),
        "good": sum(item["good"] for item in results),
        "repeats": all(item["repeats"] for item in results),
        "median": max(item["median"] for item in long),
        "noise": max(item["noise"] for item in long),
        "alone": max(entry["alone"] for entry in found),
        "chunked": max(entry["chunked"] for entry in found),
    }


def parse(lines: list[str]) -> list[dict[str, Any]]:
    """What parity_worker printed among a run's lines."""
    return [json.loads(line[7:]) for line in lines if line.startswith("PARITY ")]


def complaints(found: list[dict[str, Any]]) -> list[str]:
    """What is not good in a run's judgements; nothing when all states are right."""
    wrong: list[str] = []
    for entry in found:
        bad = [item for item in entry["results"] if not item["good"]]
        if bad:
            wrong.append(f"layers {entry['layers']}: {bad}")
        if not all(item["repeats"] for item in entry["results"]):
            wrong.append(f"layers {entry['layers']}: the same batch gave other bits")
        if entry["dtypes"] != [entry["dtype"]]:
            wrong.append(f"layers {entry['layers']}: {entry['dtypes']}, not {entry['dtype']}")
        # A sample in chunks is the sample in one pass, but for how its products were rounded.
        noise = max(item["noise_whole"] for item in entry["results"])
        for how in ("chunked", "halved"):
            if not entry[how] <= noise:
                wrong.append(f"layers {entry['layers']}: {how} differs by {entry[how]} > {noise}")
    return wrong


ENGINE = (
    "sglang",
    "model_class",
    "backbone_class",
    "attention_backend",
    "compute_dtype",
    "quantization",
)


def record(model: str, ranks: int, device: str, found: list[dict[str, Any]]) -> None:
    """Append a run to the file that EXTRACTOR_PARITY_LEDGER names, if it names one."""
    path = os.environ.get("EXTRACTOR_PARITY_LEDGER")
    if path and found:
        with Path(path).open("a") as handle:
            handle.write(json.dumps(summary(model, ranks, device, found)) + "\n")


def _order(name: str) -> tuple[int, str]:
    return {"embed": -1, "final": 1 << 30}.get(name, int(name) if name.isdigit() else 0), name
