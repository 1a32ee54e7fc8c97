"""Runs in SpecForge's environment: FOLDER STRATEGY DUMP. What its loader gives a trainer, to DUMP."""

import sys
from pathlib import Path

from safetensors.torch import save_file
from specforge.algorithms.builtin import builtin_algorithm_registry
from specforge.runtime.data_plane.feature_dataloader import FeatureDataLoader
from specforge.runtime.data_plane.feature_store import LocalFeatureStore

MAX_LEN = 256

folder, strategy, dump = sys.argv[1:]
provider = builtin_algorithm_registry().resolve(strategy).providers.offline_for("text")
reader = provider.build_reader(folder, run_id="test", ttt_length=7, max_len=MAX_LEN)
refs = reader.read()
loader = FeatureDataLoader(
    LocalFeatureStore(),
    refs=refs,
    batch_size=2,
    strategy=strategy,
    collate_fn=provider.build_collator(),
    per_sample_transform=provider.build_normalizer(MAX_LEN),
    drop_last=False,
)
tensors = {}
for number, batch in enumerate(loader):
    for key, value in batch.tensors.items():
        for row in range(len(value)):
            tensors[f"{2 * number + row}.{key}"] = value[row].contiguous()
names = [Path(ref.feature_store_uri).stem for ref in refs]
save_file(tensors, dump, {"names": ",".join(names)})
