"""docs/pictures/show.svg: what `extractor show` prints in a terminal.

    python docs/make_show_picture.py MODEL ROWS [ROW]

Needs rich. The picture uses the reader's own monospace font: nothing is fetched.
"""

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from extractor.config import DataConfig
from extractor.verbs.show import show_row

PICTURE = Path(__file__).parent / "pictures" / "show.svg"
WIDTH = 92
# Ink, and the eight colours of a terminal; black on green is what `show` marks with.
COLOURS = [(0, 0, 0), (205, 60, 60), (110, 200, 120), (220, 180, 70)]
COLOURS += [(90, 140, 230), (190, 110, 200), (80, 190, 200), (225, 225, 225)]
THEME = TerminalTheme((24, 26, 30), (225, 225, 225), COLOURS, COLOURS)


def main() -> None:
    model, rows = sys.argv[1], sys.argv[2]
    row = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    command = f"$ extractor show {Path(rows).name} --model {Path(model).name} --row {row}"
    lines = [command]
    config = DataConfig(model=model, data=(rows,), output=Path("unused"), bad_rows="skip")
    show_row(rows, row, write=lines.append, config=config)
    console = Console(record=True, width=WIDTH, force_terminal=True, file=io.StringIO())
    for line in lines:
        console.print(Text.from_ansi(line.replace(f"{Path(rows).parent}/", "")))
    picture = console.export_svg(title="extractor show", theme=THEME, unique_id="show")
    picture = re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL)
    PICTURE.write_text(picture.replace("Fira Code", "ui-monospace, Menlo, Consolas"))
    print(PICTURE)


if __name__ == "__main__":
    main()
