#!/usr/bin/env bash
# The published readers of SpecForge, speculators and Model-Optimizer, each in an environment of its own:
#
#     tests/peers/setup.sh [FOLDER]        (default: .peers beside the sources)
#
# Their requirements contradict ours and each other's (specforge pins another SGLang and torch), and all
# that is called here is their data code, which needs torch, datasets and safetensors. So each gets its own
# packages without their requirements, and sees those of the Python that runs this script. A pinned version
# is what docs/formats.md speaks of; raise it here, run the tests, and change the page.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
folder="${1:-${EXTRACTOR_PEERS_DIR:-$here/../../.peers}}"
python="${PYTHON:-python3}"
base="$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"

make() {
    local name="$1"
    shift
    if [ "$(cat "$folder/$name/ready" 2>/dev/null)" != "$*" ]; then
        rm -rf "${folder:?}/$name"
        "$python" -m venv "$folder/$name"
        "$folder/$name/bin/python" -m pip install --quiet --no-deps --disable-pip-version-check "$@"
        # After its own packages on the path, so that its own versions win.
        echo "$base" >"$("$folder/$name/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_base.pth"
        echo "$*" >"$folder/$name/ready"
    fi
    echo "$name: $folder/$name"
}

make specforge "specforge==0.2.0"
# The last two: its trainer's command line, which is asked what vocabulary it finds.
make speculators "speculators==0.9.0" "hs-connectors==0.9.0" "pydantic-settings==2.16.3" "python-dotenv==1.2.4"
make modelopt "nvidia-modelopt==0.47.0" "omegaconf==2.3.0" "antlr4-python3-runtime==4.9.3" "pulp<4"
