#!/usr/bin/env bash
# All the set-up and the tests, on a machine with two cores and no GPU: bash tests/run.sh [pytest flags]
#
#   EXTRACTOR_VENV    the virtual environment to make or use; default: .venv
#   EXTRACTOR_SGLANG  another supported release of SGLang than the newest; then the engine's tests only
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh test,demo

ruff check .
ruff format --check .
codespell
pyright
if [ $# -gt 0 ]; then
    exec python -m pytest "$@"
fi
python -m pytest -m "not gpu and not multi_gpu and not slurm"
