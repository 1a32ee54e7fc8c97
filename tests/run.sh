#!/usr/bin/env bash
# All the set-up and the tests, on a machine with two cores and no GPU: bash tests/run.sh [pytest flags]
#
#   -m slow           the long ones: every family and TP size, kills, replicas, wheels
#   EXTRACTOR_PEERS=1 also the readers that SpecForge, speculators and Model-Optimizer publish, each in an
#                     environment of its own (tests/peers/setup.sh), on files written from SmolLM2
#   EXTRACTOR_REQUIRE_BROWSER=1  a missing Chromium fails the screenshots of the report, instead of NOT RUN
#   EXTRACTOR_VENV    the virtual environment to make or use; default: .venv
#   EXTRACTOR_SLURM   the tests that start a private Slurm on this machine need root and Debian's packages
#                     slurm-wlm and munge: "install" has apt-get install these, 0 leaves the tests out
#   EXTRACTOR_SGLANG  another supported release of SGLang than the newest; then the engine's tests only,
#                     in a virtual environment of its own (.venv-RELEASE); tests/releases.sh: of all of them
set -euo pipefail
cd "$(dirname "$0")/.."
newest=0.5.23
if [ "${EXTRACTOR_SGLANG:-$newest}" != "$newest" ]; then
    # Two releases want two PyTorches: they cannot share one environment.
    export EXTRACTOR_VENV="${EXTRACTOR_VENV:-.venv}-$EXTRACTOR_SGLANG"
    source launch/environment.sh test,demo,report
    if [ $# -eq 0 ]; then
        set -- tests/unit/engine/test_compat.py tests/unit/engine/test_capture.py tests/unit/engine/test_selfcheck.py \
            tests/integration/test_parity.py tests/integration/test_layer_proof.py -k "not test_families or qwen3 or dsv3" \
            -m "not gpu and not multi_gpu and not slow"
    fi
    exec python -m pytest "$@"
fi
source launch/environment.sh test,demo,report

ruff check .
ruff format --check .
lint-imports
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

have_slurm() {
    command -v munged && command -v slurmctld && command -v slurmd && command -v sbatch
} > /dev/null

# Limits everywhere: a machine without a mirror must not hold the tests up.
apt_get() {
    DEBIAN_FRONTEND=noninteractive timeout --kill-after=20 "$1" \
        apt-get -q -y -o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20 \
        -o DPkg::Lock::Timeout=30 "${@:2}" < /dev/null > /dev/null 2>&1
}

without_slurm=""
if [ "${EXTRACTOR_SLURM:-1}" = 0 ]; then
    without_slurm="EXTRACTOR_SLURM=0"
elif [ "$(id -u)" != 0 ]; then
    without_slurm="they need root"
else
    if ! have_slurm && [ "${EXTRACTOR_SLURM:-}" = install ]; then
        echo "installing slurm-wlm and munge for the Slurm tests"
        apt_get 120 update || true
        apt_get 300 install --no-install-recommends slurm-wlm munge || true
    fi
    have_slurm || without_slurm="slurm-wlm and munge are not here, or could not be installed"
fi
if [ -n "$without_slurm" ]; then
    echo "Slurm tests NOT RUN: $without_slurm"
else
    EXTRACTOR_REQUIRE_SLURM=1 python -m pytest -m "slurm and not slow" tests/slurm
fi
