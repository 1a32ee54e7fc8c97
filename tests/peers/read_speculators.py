"""Runs in speculators' environment: FOLDER file|fp8 DUMP. What its dataset and its collator for EAGLE-3
give a trainer, to DUMP."""

import sys
from pathlib import Path

from hs_connectors import FileTransfer, FP8Transfer
from safetensors.torch import save_file
from speculators.data_generation.offline import (
    check_hidden_states,
    find_corrupt_hidden_state_indices,
    get_existing_hidden_state_indices,
)
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import ArrowDataset, CollateFn

MAX_LEN, HIDDEN = 512, 576

folder, kind, dump = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
states = folder / "hidden_states"
transfer = {"file": FileTransfer, "fp8": FP8Transfer}[kind](states)
data = ArrowDataset(max_len=MAX_LEN, datapath=folder, transfer=transfer, on_missing="raise")
existing = get_existing_hidden_state_indices(states)
assert existing == list(range(len(data))), existing
assert not find_corrupt_hidden_state_indices(states, existing)
tensors = {}
for i in range(len(data)):
    check_hidden_states(transfer.get_cached(i), data.data[i]["input_ids"].tolist())
    for key, value in data[i].items():
        tensors[f"{i}.{key}"] = value.contiguous()
assert data.approx_lengths == [len(tensors[f"{i}.input_ids"]) for i in range(len(data))]
collate = CollateFn(MAX_LEN, HIDDEN, num_target_layers=3, preprocess=shift_batch)
batch = collate([data[i] for i in range(len(data))])
assert batch.pop("error_records") == 0
tensors.update({f"batch.{key}": value.contiguous() for key, value in batch.items()})
save_file(tensors, dump)
