"""Draws every measured share of the bare forward from benchmarks/results/, as one SVG.

    python -m benchmarks.plot_results [--results FOLDER] [--picture docs/pictures/shares.svg]

Left: tokens/s of the bare forward and of the whole pipeline, in thousands. Right: the share of each
run, as points, with the median. Results of other benchmarks are passed over.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
BARE, WHOLE, INK = "#9db4c8", "#1f5f99", "#24292f"
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "shares",
    "font.size": 9,
    "font.family": "sans-serif",
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One result of bench_extract.

    Attributes:
        label: shape, device, batch and attention: what is on the axis.
        bare, whole: medians, tokens/s.
        shares: of each run, whole over bare.
    """

    label: str
    bare: float
    whole: float
    shares: tuple[float, ...]

    @classmethod
    def of(cls, content: dict[str, Any]) -> "Measured | None":
        """None for the result of another benchmark."""
        result = content.get("result", {})
        if result.get("benchmark") != "bench_extract":
            return None
        attention = result["engine"]["attention_backend"].removesuffix("Backend")
        label = f"{result['model']}, {attention}\n{result['max_tokens']:,} a batch"
        if result["engine"].get("kv_writes") == "all":
            label += ", all keys written"
        return cls(
            f"{label}\n{content['date']}",
            result["bare_tokens_per_s"],
            result["whole_tokens_per_s"],
            tuple(run["share"] for run in result["runs"]),
        )


def read(folder: Path) -> list[Measured]:
    contents = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return [found for found in map(Measured.of, contents) if found is not None]


def draw(found: list[Measured]) -> Figure:
    figure = Figure(figsize=(9, 0.9 + 0.72 * len(found)), layout="constrained")
    rates, shares = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    places = range(len(found))
    rates.barh([p - 0.18 for p in places], [m.bare / 1e3 for m in found], 0.34, color=BARE)
    rates.barh([p + 0.18 for p in places], [m.whole / 1e3 for m in found], 0.34, color=WHOLE)
    rates.set_yticks(list(places), [m.label for m in found])
    rates.invert_yaxis()
    rates.set_xlabel("1,000 tokens/s: bare (light), with files (dark)")
    for place, measured in zip(places, found, strict=True):
        middle = sorted(measured.shares)[len(measured.shares) // 2]
        shares.plot(measured.shares, [place] * len(measured.shares), "o", color=WHOLE, alpha=0.5)
        shares.plot([middle], [place], "|", color=INK, markersize=18)
        shares.annotate(f"{middle:.3f}", (middle, place - 0.3), ha="center", color=INK)
    shares.set_xlabel("share, each run")
    shares.axvline(1.0, color=BARE, linewidth=1)
    for axes in (rates, shares):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs/pictures/shares.svg")
    args = parser.parse_args()
    import matplotlib

    found = read(args.results)
    with matplotlib.rc_context(STYLE):
        draw(found).savefig(args.picture, metadata={"Date": None})
    print(f"{args.picture}: {len(found)} results")


if __name__ == "__main__":
    main()
