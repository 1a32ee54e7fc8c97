"""Makes the table in docs/families.md from what the parity tests found. From the repository's root:

EXTRACTOR_PARITY_LEDGER=docs/families.jsonl python -m pytest tests/integration/test_parity.py
python -m docs.families                          # writes the table
python -m docs.families --log LOG MODEL TP [DEVICE]   # adds what one run of parity_worker printed
python -m docs.families --differ A B             # two files of EXTRACTOR_PARITY_STATES
"""

import json
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from tests.support.parity_ledger import parse, summary

HERE = Path(__file__).resolve().parent
LEDGER, PAGE = HERE / "families.jsonl", HERE / "families.md"
BEGIN, END = "<!-- table: docs/families.py -->", "<!-- end -->"
FAMILIES = {
    "smollm2": "Llama (SmolLM2, real weights)",
    "tiny_llama": "Llama",
    "wide_llama": "Llama, heads of 128",
    "tiny_qwen2": "Qwen2",
    "tiny_qwen3": "Qwen3",
    "wide_qwen3": "Qwen3, heads of 128",
    "fp8_qwen3": "Qwen3, fp8 in blocks of 128 x 128",
    "fp8_tensor_qwen3": "Qwen3, fp8 a matrix, static inputs",
    "ct_fp8_qwen3": "Qwen3, compressed-tensors fp8 W8A8",
    "ct_int8_qwen3": "Qwen3, compressed-tensors int8 W8A8",
    "ct_int4_qwen3": "Qwen3, compressed-tensors int4 W4A16",
    "awq_qwen3": "Qwen3, AWQ 4 bits",
    "tiny_qwen3moe": "Qwen3-MoE",
    "fp8_qwen3moe": "Qwen3-MoE, fp8 in blocks of 128 x 128",
    "tiny_mistral": "Mistral",
    "tiny_gemma3": "Gemma-3",
    "tiny_gptoss": "GPT-OSS",
    "wide_gptoss": "GPT-OSS, heads of 64",
    "tiny_glm4moe": "GLM-4-MoE",
    "tiny_dsv3": "DeepSeek-V3",
    "wide_dsv3": "DeepSeek-V3, latent of 512",
    "fp8_dsv3": "DeepSeek-V3, latent of 512, fp8 in blocks of 128 x 128",
    "tiny_kimi": "Kimi-K2.5",
    "tiny_llama4": "Llama-4",
    "tiny_qwen3next": "Qwen3-Next",
}
HEAD = (
    "family",
    "model class",
    "SGLang",
    "device",
    "TP",
    "states",
    "worst median",
    "bf16 noise",
    "",
)


def table(runs: list[dict[str, Any]]) -> str:
    """A row a family, release and device; the TP sizes and states of its runs together."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    # The last word on a model, release and size counts.
    last = {(*_row(r), r["tp"], r.get("ep", 1)): r for r in runs}
    for run in last.values():
        groups.setdefault(_row(run), []).append(run)
    lines = [" | ".join(HEAD), " | ".join("---" for _ in HEAD)]
    order = list(FAMILIES)
    for (model, sglang, device, backend), found in sorted(
        groups.items(), key=lambda item: (order.index(item[0][0]), item[0][1:])
    ):
        states = {name for run in found for name in run["states"]}
        good = all(run["good"] == run["checked"] and run["repeats"] for run in found)
        cells = (
            FAMILIES[model],
            f"`{found[0]['model_class']}`",
            sglang,
            ", ".join(filter(None, (device, found[0]["compute_dtype"], backend))),
            ", ".join(_ranks(run) for run in sorted(found, key=lambda run: run["tp"])),
            ", ".join(_short(states)),
            f"{max(run['median'] for run in found):.1e}",
            f"{max(run['noise'] for run in found):.1e}",
            "proved" if good else "**refuted**",
        )
        lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines)


def _row(run: dict[str, Any]) -> tuple[str, str, str, str]:
    """Model, release, device and, where there is a choice, attention backend."""
    backend = "" if run["device"] == "cpu" else run["attention_backend"].removesuffix("Backend")
    return run["model"], run["sglang"], run["device"], backend.removesuffix("Attn")


def _ranks(run: dict[str, Any]) -> str:
    return f"{run['tp']} (EP {run['ep']})" if run.get("ep", 1) > 1 else str(run["tp"])


def _short(states: set[str]) -> list[str]:
    layers = sorted(int(name) for name in states if name.isdigit())
    span = [str(k) for k in layers]
    if len(layers) > 8 and layers == list(range(layers[0], layers[-1] + 1)):
        span = [f"{layers[0]}-{layers[-1]}"]
    return [*span, *(name for name in ("embed", "final") if name in states)]


def add_log(log: Path, model: str, ranks: int, device: str = "cpu") -> None:
    """A run of parity_worker by hand, as the tests would have recorded it."""
    run = summary(model, ranks, device, parse(log.read_text().splitlines()))
    with LEDGER.open("a") as handle:
        handle.write(json.dumps(run) + "\n")


def differ(one: Path, other: Path) -> str:
    """The largest relative difference of any state of two runs."""
    a, b = load_file(one), load_file(other)
    worst = max(float((a[n].float() - b[n].float()).norm() / a[n].float().norm()) for n in a)
    return f"{worst:.1e}"


def main(argv: list[str]) -> None:
    if argv[:1] == ["--log"]:
        add_log(Path(argv[1]), argv[2], int(argv[3]), *argv[4:5])
    elif argv[:1] == ["--differ"]:
        sys.stdout.write(differ(Path(argv[1]), Path(argv[2])) + "\n")
    else:
        runs = [json.loads(line) for line in LEDGER.read_text().splitlines()]
        before, _, rest = PAGE.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text(f"{before}{BEGIN}\n{table(runs)}\n{END}{after}")


if __name__ == "__main__":
    main(sys.argv[1:])
