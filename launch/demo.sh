#!/usr/bin/env bash
# All the set-up and the main job on a small real model, on any machine: bash launch/demo.sh
#
#   --model PATH_OR_HUB_ID   another model than SmolLM2-135M-Instruct
#   --output FOLDER          default: demo-out beside this repository's files
#   EXTRACTOR_VENV           the virtual environment to make or use; default: .venv
set -euo pipefail
cd "$(dirname "$0")/.."

model="" output="demo-out" device="auto" ranks=1
while [ $# -gt 0 ]; do
    case "$1" in
        --model) model="$2"; shift 2 ;;
        --output) output="$2"; shift 2 ;;
        --device) device="$2"; shift 2 ;;
        --ranks) ranks="$2"; shift 2 ;;
        *) echo "demo.sh: unknown flag $1 (--model, --output, --device, --ranks)" >&2; exit 2 ;;
    esac
done

source launch/environment.sh demo

if [ -z "$model" ]; then
    model="${XDG_CACHE_HOME:-$HOME/.cache}/extractor/smollm2-135m-instruct"
    [ -f "$model/config.json" ] || { echo "unpacking SmolLM2-135M-Instruct into $model"; python launch/demo_model.py "$model"; }
fi

echo "extracting: torchrun --nproc-per-node $ranks launch/extract.py --model $model ..."
torchrun --standalone --nproc-per-node "$ranks" launch/extract.py \
    --model "$model" --data launch/data/conversations.jsonl --output "$output" --device "$device"

echo
echo "The files are in $output/samples/00000. One of them:"
python - "$output" <<'PYTHON'
import sys
from pathlib import Path

from safetensors import safe_open

path = sorted(Path(sys.argv[1], "samples").rglob("*.safetensors"))[0]
print(path)
with safe_open(path, "pt") as file:
    print("  metadata", file.metadata())
    for name in file.keys():
        tensor = file.get_slice(name)
        print(f"  {name:24} {tensor.get_dtype():5} {tensor.get_shape()}")
PYTHON
echo
echo "Look at a sample with its mask:  $(command -v python) -m extractor show $output --row 0"
