"""The table of docs/reliability.md, from what the tests wrote into their ledger.

usage: make_reliability.py LEDGER      (pytest ... --fault-ledger LEDGER)
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("reliability.md")
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
MACHINE = "2-core x86-64 CPU"


def table(lines: Sequence[dict[str, Any]], date: str) -> str:
    """Markdown; a fault that several tests injected is one row."""
    commands = [line["command"] for line in lines if "command" in line]
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
    text = f"{MACHINE}, {date}, one row a fault, from:\n\n"
    text += "".join(f"    {command}\n" for command in commands)
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
    PAGE.write_text(head + BEGIN + table(lines, time.strftime("%Y-%m-%d")) + END + tail)


if __name__ == "__main__":
    main()
