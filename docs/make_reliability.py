"""The table of docs/reliability.md, from what the tests wrote into their ledger.

usage: make_reliability.py LEDGER      (pytest ... --fault-ledger LEDGER)

A session that failed or did not end makes no table: what a failing test injected is not in the ledger.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("reliability.md")
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"


def sessions(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each test session's first line. Raises ValueError for one that failed or did not end."""
    begun = [line for line in lines if "command" in line]
    ended = [line for line in lines if "ended" in line]
    if len(begun) != len(ended) or any(line["ended"] or line["failed"] for line in ended):
        raise ValueError(f"{len(begun)} sessions, ended: {ended}")
    return begun


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Markdown; a fault that several tests injected is one row."""
    begun = sessions(lines)
    machines = " and ".join(sorted({line["machine"] for line in begun}))
    dates = " and ".join(sorted({line["date"] for line in begun}))
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for line in lines:
        if "fault" not in line:
            continue
        row = rows.setdefault(
            (line["group"], line["fault"]), {"times": 0, "lost": 0, "hung": 0, "slowest": None}
        )
        for name in ("times", "lost", "hung"):
            row[name] += line[name]
        if line["slowest"] is not None:
            row["slowest"] = max(row["slowest"] or 0.0, line["slowest"])
    text = f"{machines}, {dates}, one row a fault, from:\n\n"
    text += "".join(f"    {line['command']}\n" for line in begun)
    text += "\n| | fault | times injected | lost | hung | slowest, s |\n"
    text += "| --- | --- | ---: | ---: | ---: | ---: |\n"
    for (group, fault), row in sorted(rows.items()):
        slowest = "" if row["slowest"] is None else f"{row['slowest']:.0f}"
        text += f"| {group} | {fault} | {row['times']} | {row['lost']} | {row['hung']} |"
        text += f" {slowest} |\n"
    total = sum(row["times"] for row in rows.values())
    lost, hung = (sum(row[name] for row in rows.values()) for name in ("lost", "hung"))
    return text + f"| | **all** | **{total}** | **{lost}** | **{hung}** | |\n"


def main() -> None:
    lines = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    page = PAGE.read_text()
    head, rest = page.split(BEGIN)
    _, tail = rest.split(END)
    PAGE.write_text(head + BEGIN + table(lines) + END + tail)


if __name__ == "__main__":
    main()
