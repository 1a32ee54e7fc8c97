"""How fast rows become samples: `python benchmarks/bench_prepare.py --model DIR [--rows N]`.

Prints what it does, and one line of JSON last: rows, tokens and seconds, peak memory of this
process, and how long opening the store again takes.
"""

import argparse
import json
import os
import random
import resource
import shutil
import tempfile
import time
from pathlib import Path

from extractor.config import DataConfig
from extractor.model import ModelSpec
from extractor.prepared.store import PreparedStore
from extractor.rows.prepare import prepare

WORDS = [
    "the", "a", "model", "state", "hidden", "layer", "token", "of", "and", "to", "in", "that",
    "it", "is", "was", "for", "on", "are", "as", "with", "they", "at", "be", "this", "have",
    "from", "or", "one", "had", "by", "word", "but", "not", "what", "all", "were", "we", "when",
    "your", "can", "said", "there", "use", "each", "which", "she", "do", "how", "their", "if",
    "will", "up", "other", "about", "out", "many", "then", "them", "these", "so", "some", "her",
    "would", "make", "12", "2026", "0.5", "naïve", "世界", "def", "return", "{}", "()", "->",
    "==",
]  # fmt: skip


def write_rows(path: Path, rows: int, tokens: int) -> None:
    """Two-turn conversations of about so many tokens."""
    chance = random.Random(0)
    with path.open("w") as file:
        for number in range(rows):
            turns: list[dict[str, str]] = []
            for _ in range(2):
                asked = " ".join(chance.choices(WORDS, k=tokens // 8))
                answered = " ".join(chance.choices(WORDS, k=tokens // 4))
                turns.append({"role": "user", "content": asked})
                turns.append({"role": "assistant", "content": answered})
            file.write(json.dumps({"id": f"r{number}", "messages": turns}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--workers", type=int, default=None)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-prepare-"))
    try:
        data = folder / "rows.jsonl"
        write_rows(data, arguments.rows, arguments.tokens)
        config = DataConfig(
            model=arguments.model,
            data=(str(data),),
            output=folder / "out",
            workers=arguments.workers,
        )
        spec = ModelSpec.read(arguments.model)
        begin = time.perf_counter()
        store = prepare(config, spec, print)
        seconds = time.perf_counter() - begin
        begin = time.perf_counter()
        PreparedStore.open(store.path).sample(len(store) - 1)
        opening = time.perf_counter() - begin
        tokens = store.summary()["tokens"]
        result = {
            "benchmark": "prepare",
            "rows": len(store),
            "tokens_per_row": round(tokens / len(store), 1),
            "workers": arguments.workers or len(os.sched_getaffinity(0)),
            "seconds": round(seconds, 2),
            "rows_per_minute": round(len(store) / seconds * 60),
            "tokens_per_second": round(tokens / seconds),
            "input_mb": round(data.stat().st_size / 1e6, 1),
            "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3),
            "open_ms": round(opening * 1e3, 2),
        }
        print(json.dumps(result))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
