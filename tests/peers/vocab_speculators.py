"""Runs in speculators' environment: FOLDER SIZE DUMP. The draft vocabulary that its trainer finds in the
folder, and the ones that it makes from token_freq.pt and from the dataset by itself."""

import json
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

import torch
from datasets import load_from_disk
from safetensors.torch import save_file
from speculators.train.cli import parse_vocab_mappings
from speculators.train.vocab_mapping import (
    build_vocab_mappings_from_distribution,
    save_token_frequency_distribution,
)

folder, size, dump = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
vocab_size = json.loads((folder / "run.json").read_text())["model"]["vocab_size"]
arguments = Namespace(
    d2t_path=None,
    t2d_path=None,
    token_freq_path=None,
    data_path=str(folder),
    draft_vocab_size=size,
    verifier_name_or_path="nowhere",
    trust_remote_code=False,
)
d2t, t2d, found = parse_vocab_mappings(arguments)
assert found == size
counts = torch.load(folder / "token_freq.pt", weights_only=True)
made = build_vocab_mappings_from_distribution(counts, size, vocab_size)
with tempfile.TemporaryDirectory() as place:
    own = Path(place) / "token_freq.pt"
    save_token_frequency_distribution(load_from_disk(str(folder)).with_format("torch"), own)
    assert torch.load(own, weights_only=True) == counts
loaded = {"loaded.d2t": d2t, "loaded.t2d": t2d}
save_file({**loaded, "derived.d2t": made[0], "derived.t2d": made[1]}, dump)
