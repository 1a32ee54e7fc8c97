"""torchrun --nproc-per-node 8 launch/extract.py --model M --data rows.jsonl --output OUT"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from extractor.cli import main

if __name__ == "__main__":
    main(["extract", *sys.argv[1:]])
