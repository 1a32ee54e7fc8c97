"""Runs in Model-Optimizer's environment: FOLDER - DUMP. What its dataset and collator give a trainer."""

import sys
from pathlib import Path

from modelopt.torch.speculative.eagle.utils import (
    EagleOfflineDataCollator,
    OfflineSupervisedDataset,
)
from safetensors.torch import save_file

folder, _, dump = sys.argv[1:]
files = sorted(map(str, Path(folder).rglob("*.pt")))  # as its own data module finds them
data = OfflineSupervisedDataset(files, answer_only_loss=True)
items = [data[i] for i in range(len(data))]
tensors = {}
for i, item in enumerate(items):
    assert item.pop("base_hidden_prenorm") is False
    tensors.update({f"{i}.{key}": value.contiguous() for key, value in item.items()})
batch = EagleOfflineDataCollator(256)([data[i] for i in range(len(data))])
outputs = batch.pop("base_model_outputs")
assert outputs.pop("base_hidden_prenorm") is False
tensors.update({f"batch.{k}": v.contiguous() for k, v in {**batch, **outputs}.items()})
save_file(tensors, dump)
