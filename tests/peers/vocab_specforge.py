"""Runs in SpecForge's environment: FOLDER SIZE DUMP. The draft vocabulary that its trainer takes from
vocab_mapping.pt, and the one that it derives from the folder's files by itself."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from specforge.core.compact_teacher import validate_vocab_mapping_consistency
from specforge.data.preprocessing import process_token_dict_to_mappings
from specforge.modeling.draft.base import Eagle3DraftModel
from specforge.training.vocab_mapping import count_effective_feature_tokens

folder, size, dump = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
vocab_size = json.loads((folder / "run.json").read_text())["model"]["vocab_size"]
drafter = torch.nn.Module()
drafter.register_buffer("d2t", torch.zeros(size, dtype=torch.int64))
drafter.register_buffer("t2d", torch.zeros(vocab_size, dtype=torch.bool))
Eagle3DraftModel.load_vocab_mapping(drafter, str(folder / "vocab" / "vocab_mapping.pt"))
assert drafter.vocab_mapping_loaded
validate_vocab_mapping_consistency(drafter.t2d, drafter.d2t)
counts = count_effective_feature_tokens(str(folder), max_length=256, target_vocab_size=vocab_size)
d2t, t2d = process_token_dict_to_mappings(counts, size, vocab_size)
loaded = {"loaded.d2t": drafter.d2t, "loaded.t2d": drafter.t2d}
save_file({**loaded, "derived.d2t": d2t, "derived.t2d": t2d}, dump)
