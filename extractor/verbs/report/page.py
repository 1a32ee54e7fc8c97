"""The page itself, from facts and pictures."""

import shlex
from importlib import resources
from typing import Any

from jinja2 import Environment

from extractor.progress import duration, size
from extractor.verbs.report import plots
from extractor.verbs.report.facts import Facts, Shown


def render(facts: Facts) -> str:
    """HTML, complete in itself. Every text of the data's is escaped."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = resources.files("extractor.verbs.report").joinpath("page.html.jinja").read_text()
    points = plots.timelines(facts)
    pictures = {
        "lengths": plots.lengths(facts),
        "supervised": plots.supervised(facts),
        "norms": plots.norms(facts),
        "outliers": plots.outliers(facts),
        "disk": plots.disk(facts),
    }
    if points:
        pictures.update(throughput=plots.throughput(points), waits=plots.waits(points))
    return environment.from_string(template).render(
        facts=facts,
        run=facts.run,
        title=f"{facts.run.model.path.rstrip('/').rpartition('/')[2]}",
        figures=_figures(facts),
        settings=_settings(facts),
        pictures=pictures,
        spent=_spent(facts),
        samples=[_marked(shown) for shown in facts.shown],
    )


def _figures(facts: Facts) -> list[tuple[str, str, str]]:
    """(value, what it is, a remark) for the top of the page."""
    rejected = sum(facts.reasons.values())
    seconds = max((replica.seconds for replica in facts.replicas), default=0)
    tokens = sum(replica.tokens for replica in facts.replicas)
    figures = [
        (f"{len(facts.lengths):,}", "samples", f"of {facts.tokens:,} tokens"),
        (
            f"{rejected:,}",
            "rejected",
            "rows or turns left out" if rejected else "no row was left out",
        ),
        (
            f"{facts.supervised.mean():.0%}"
            if facts.supervised_tokens is None
            else f"{facts.supervised_tokens / facts.tokens:.0%}",
            "supervised",
            "of the tokens"
            if facts.supervised_tokens is not None
            else f"mean of {len(facts.supervised):,} samples",
        ),
        (
            size(int(facts.bytes.sum())),
            "on disk",
            f"{facts.bytes.sum() / facts.tokens:,.0f} B a token",
        ),
    ]
    if seconds and tokens:
        rate = tokens / seconds
        figures.append((f"{rate:,.0f}", "tokens/s", f"in the last run, of {duration(seconds)}"))
    return figures


def _settings(facts: Facts) -> list[tuple[str, str]]:
    run = facts.run
    model, world, origin = run.model, run.world, run.converted_from
    shape = f"{model.architecture}, {model.num_layers} layers of {model.hidden_size:,}"
    versions = ", ".join(f"{name} {version}" for name, version in (run.versions or {}).items())
    rows = [
        ("model", model.path),
        ("shape", shape),
        ("states", ", ".join(run.layers)),
        ("stored as", f"{run.dtype}, layout {run.layout}"),
    ]
    if world is not None:
        ranks = (
            f"{world.ranks} {run.device or ''} ranks: {world.replicas} replicas of --tp {world.tp}"
        )
        rows.append(("ran on", ranks))
    rows += [
        ("versions", versions),
        ("commit", run.git_commit or ""),
        ("started", run.started or ""),
        ("finished", run.finished or ""),
        ("runs before", f"{len(run.earlier)}" if run.earlier else ""),
        ("converted from", f"{origin.folder} ({origin.layout})" if origin else ""),
        ("command", shlex.join(run.argv or ())),
        ("fingerprint", run.fingerprint),
    ]
    return [(name, text) for name, text in rows if text]


def _spent(facts: Facts) -> list[tuple[str, float, str]]:
    """(stage, share, time): where the last run's time went."""
    stages = facts.run.stages or {}
    total = sum(stages.values())
    return [(name, value / total, f"{value:,.1f} s") for name, value in stages.items() if total]


def _marked(shown: Shown) -> dict[str, Any]:
    """Neighbours of one colour joined, so that the page stays small; ends of lines made visible."""
    runs: list[tuple[bool, list[str]]] = []
    for text, supervised in shown.tokens:
        if not runs or runs[-1][0] != supervised:
            runs.append((supervised, []))
        runs[-1][1].append(text.replace("\n", "\u21b5\n"))
    return {"title": shown.title, "runs": runs, "left_out": shown.left_out}
