#!/usr/bin/env bash
# All the set-up and the tests, on a machine with two cores and no GPU: bash tests/run.sh [pytest flags]
#
#   -m slow           the long ones: every family and TP size, kills, replicas, wheels
#   EXTRACTOR_PEERS=1 also the readers that SpecForge, speculators and Model-Optimizer publish, each in an
#                     environment of its own (tests/peers/setup.sh), on files written from SmolLM2
#   EXTRACTOR_REQUIRE_BROWSER=1  a missing Chromium fails the screenshots of the report, instead of NOT RUN
#   EXTRACTOR_VENV    the virtual environment to make or use; default: .venv
#   EXTRACTOR_SGLANG  another supported release of SGLang than the newest; then the engine's tests only,
#                     in a virtual environment of its own (.venv-RELEASE)
set -euo pipefail
cd "$(dirname "$0")/.."
newest=0.5.23
if [ "${EXTRACTOR_SGLANG:-$newest}" != "$newest" ]; then
    # Two releases want two PyTorches: they cannot share one environment.
    export EXTRACTOR_VENV="${EXTRACTOR_VENV:-.venv}-$EXTRACTOR_SGLANG"
    source launch/environment.sh test,demo,report
    if [ $# -eq 0 ]; then
        set -- tests/unit/test_compat.py tests/unit/test_capture.py tests/unit/test_selfcheck.py \
            tests/integration/test_parity.py -k "not test_families or qwen3 or dsv3" \
            -m "not gpu and not multi_gpu and not slow"
    fi
    exec python -m pytest "$@"
fi
source launch/environment.sh test,demo,report

ruff check .
ruff format --check .
codespell
pyright
if [ $# -gt 0 ]; then
    exec python -m pytest "$@"
fi
python -m pytest -m "not gpu and not multi_gpu and not slurm and not slow"
if [ "${EXTRACTOR_PEERS:-}" = 1 ]; then
    tests/peers/setup.sh
    python -m pytest tests/peers -m "not gpu"
fi
