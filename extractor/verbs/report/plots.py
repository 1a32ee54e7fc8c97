"""Pictures as SVG that belongs in a page: text stays text, and colours are the page's own."""

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

from extractor.verbs.report.facts import Facts, Floats

# matplotlib wants a colour where the page has a variable: each stands for one and is replaced below.
INK, FAINT, GRID = "#0a0001", "#0a0002", "#0a0003"
BLUE, AMBER, GREEN, VIOLET, RED = "#0b0001", "#0b0002", "#0b0003", "#0b0004", "#0b0005"
VARIABLES = {
    INK: "--ink",
    FAINT: "--faint",
    GRID: "--grid",
    BLUE: "--blue",
    AMBER: "--amber",
    GREEN: "--green",
    VIOLET: "--violet",
    RED: "--red",
}
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
}
WAITS = (("model", BLUE), ("disk", AMBER), ("data", VIOLET))
THOUSANDS = FuncFormatter(lambda value, _: f"{value:,.0f}")
PERCENT = FuncFormatter(lambda value, _: f"{value:.0%}")


def draw(paint: Callable[[Any], None], name: str, width: float = 6.4, height: float = 2.5) -> str:
    """paint(axes) onto a new figure; the SVG element. name keeps its ids apart from other pictures'."""
    style: Any = {**STYLE, "svg.hashsalt": name}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        paint(figure.add_subplot())
        stream = io.StringIO()
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    svg = stream.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    return svg


def lengths(facts: Facts) -> str:
    def paint(axes: Any) -> None:
        values = facts.lengths
        bins = np.histogram_bin_edges(values, bins=min(40, max(len(np.unique(values)), 5)))
        axes.hist(values, bins=bins, color=BLUE, rwidth=0.9)
        axes.axvline(np.median(values), color=AMBER, linewidth=1.4)
        axes.set(xlabel="tokens of a sample", ylabel="samples")
        _counts(axes)

    return draw(paint, "lengths")


def supervised(facts: Facts) -> str:
    def paint(axes: Any) -> None:
        axes.hist(facts.supervised, bins=np.linspace(0, 1, 26), color=GREEN, rwidth=0.9)
        axes.set(xlabel="supervised share of a sample", ylabel="samples", xlim=(0, 1))
        axes.xaxis.set_major_formatter(PERCENT)
        _counts(axes, x=False)

    return draw(paint, "supervised")


def _counts(axes: Any, x: bool = True) -> None:
    axes.xaxis.grid(False)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_formatter(THOUSANDS)
    if x:
        axes.xaxis.set_major_formatter(THOUSANDS)


def timelines(facts: Facts) -> list[Floats]:
    """Each replica's points, f64 [points, 6]; those with too few to draw are left out."""
    found = [np.array(replica.timeline, np.float64) for replica in facts.replicas]
    return [points for points in found if points.ndim == 2 and len(points) >= 3]


def throughput(points: Sequence[Floats]) -> str:
    """Tokens a second over time, replicas stacked."""
    end = max(float(p[-1, 0]) for p in points)
    edges = np.linspace(0, end, min(80, max(len(p) for p in points)) + 1)

    def paint(axes: Any) -> None:
        rates = [np.diff(_at(p, edges, 1)) / np.diff(edges) for p in points]
        total = np.sum(rates, axis=0)
        below = np.zeros(len(total))
        for number, rate in enumerate(rates):
            axes.stairs(
                below + rate,
                edges,
                baseline=below,
                fill=True,
                color=BLUE,
                alpha=0.55 - 0.3 * (number % 2),
            )
            below = below + rate
        axes.stairs(total, edges, color=BLUE, linewidth=1.6, baseline=None)
        axes.set(xlabel="seconds", ylabel="tokens/s", xlim=(0, end), ylim=(0, None))
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))

    return draw(paint, "throughput")


def waits(points: Sequence[Floats]) -> str:
    """What the replicas' time went to, as shares over time."""
    end = max(float(p[-1, 0]) for p in points)
    edges = np.linspace(0, end, min(40, max(len(p) for p in points)) + 1)

    def paint(axes: Any) -> None:
        columns = {"data": 3, "disk": 4, "model": 5}
        spent = {
            name: np.sum([np.diff(_at(p, edges, columns[name])) for p in points], axis=0)
            for name, _ in WAITS
        }
        total = np.maximum(sum(spent.values()), 1e-9)
        below = np.zeros(len(edges) - 1)
        for name, colour in WAITS:
            share = spent[name] / total
            axes.stairs(below + share, edges, baseline=below, fill=True, color=colour, label=name)
            below = below + share
        axes.set(xlabel="seconds", ylabel="share of time", xlim=(0, end), ylim=(0, 1))
        axes.yaxis.set_major_formatter(PERCENT)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2)

    return draw(paint, "waits")


def _at(points: Floats, times: Floats, column: int) -> Floats:
    """A running count at the times given, from 0 at time 0."""
    seconds = np.concatenate([[0.0], points[:, 0]])
    return np.interp(times, seconds, np.concatenate([[0.0], points[:, column]]))


def norms(facts: Facts) -> str:
    return _by_state(facts, "norms", "norm of a token", BLUE)


def outliers(facts: Facts) -> str:
    return _by_state(facts, "outliers", "largest / root mean square", VIOLET)


def _by_state(facts: Facts, what: str, label: str, colour: str) -> str:
    """Median, 5th to 95th percentile, and the largest, by state."""
    names = [state.name for state in facts.states]
    values = [getattr(state, what) for state in facts.states]
    low, middle, high = (np.array([np.percentile(v, q) for v in values]) for q in (5, 50, 95))
    top = np.array([v.max() for v in values])

    def paint(axes: Any) -> None:
        at = np.arange(len(names))
        axes.vlines(at, low, high, color=colour, linewidth=9, alpha=0.28, label="5 % to 95 %")
        axes.plot(at, middle, "o", color=colour, markersize=6, label="median")
        axes.plot(at, top, "_", color=RED, markersize=11, markeredgewidth=2, label="largest")
        axes.set(ylabel=label, xlim=(-0.6, len(names) - 0.4), yscale="log")
        axes.set_xticks(at, names)
        axes.xaxis.grid(False)
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        axes.yaxis.set_minor_formatter(FuncFormatter(lambda *_: ""))
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2)

    return draw(paint, what)


def disk(facts: Facts) -> str:
    """Bytes by tensor, over all files."""
    names, sizes = list(facts.planes), np.array(list(facts.planes.values()), np.float64)

    def paint(axes: Any) -> None:
        at = np.arange(len(names))[::-1]
        axes.barh(at, sizes, color=BLUE, height=0.62)
        for y, value in zip(at, sizes, strict=True):
            label = f"{value / max(sizes.sum(), 1):.1%}"
            axes.annotate(
                label, (value, y), (6, 0), textcoords="offset points", va="center", color=FAINT
            )
        axes.set_yticks(at, names)
        axes.yaxis.grid(False)
        axes.set_xlim(0, max(float(sizes.max()) * 1.14, 1))
        axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
        axes.xaxis.set_major_locator(MaxNLocator(5))

    return draw(paint, "disk", height=0.6 + 0.32 * len(names))
