"""SpecForge's own generator of offline features, as its scripts/prepare_hidden_states.py runs it.

Its model build, data loader with padding, capture and writing threads are called from its script; left
out are only its tokenizer and chat template, because the rows here are token ids. The script is not in
its wheel: --script names a copy out of its repository. Samples that do not fill a last batch are not
counted: its loader drops them.
"""

import importlib.util
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import common


def main() -> None:
    parser = common.parser("SpecForge, prepare_hidden_states.py")
    parser.add_argument("--script", type=Path, required=True)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument("--attention-backend", default="triton")
    args = parser.parse_args()
    script = load(args.script)
    rows = common.read_rows(args.rows)
    rows = rows[: len(rows) // args.batch_size * args.batch_size]
    if not rows:
        sys.exit(
            f"fewer samples than one batch of {args.batch_size}: its loader would drop them all"
        )
    theirs = its_arguments(script, args)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(port)
    script.init_distributed(timeout=10, tp_size=1)
    config = script.AutoConfig.from_pretrained(args.model)
    # The script's own build_target_model() but for load_format.
    model = script.load_offline_capture(
        args.model, torch_dtype=config.dtype, load_format="dummy", **script._sglang_kwargs(theirs)
    )
    model.set_capture_layers(common.layers(args.layers), capture_method="eagle3")
    data = [
        {
            "input_ids": torch.tensor([ids]),
            "attention_mask": torch.ones(1, len(ids), dtype=torch.long),
            "loss_mask": torch.ones(1, len(ids), dtype=torch.long),
        }
        for ids in rows
    ]

    def one_pass(output: Path) -> None:
        loader = script.prepare_dp_dataloaders(
            dataset=data,
            batch_size=args.batch_size,
            num_workers=theirs.num_workers,
            shuffle=False,
            process_group=script.get_dp_group(),
        )
        with script.HiddenStatesGenerator(
            model,
            num_io_threads=os.cpu_count() or 1,
            io_queue_size=theirs.io_queue_size,
            file_group_size=theirs.file_group_size,
        ) as generator:
            generator.generate(loader, str(output), start_idx=0, samples_per_dp=len(rows))

    padded = sum(
        max(map(len, rows[at : at + args.batch_size])) * args.batch_size
        for at in range(0, len(rows), args.batch_size)
    )
    common.measure(
        args,
        rows,
        one_pass,
        files="*.ckpt",
        packages=("specforge", "sglang", "transformers"),
        settings={
            "batch_size": args.batch_size,
            "max_length": args.max_length,
            "attention_backend": args.attention_backend,
            "padding": round(1 - sum(map(len, rows)) / padded, 4),
        },
    )
    script.destroy_distributed()


def load(path: Path) -> Any:
    """Its script as a module. It is not installed with the package."""
    spec = importlib.util.spec_from_file_location("prepare_hidden_states", path)
    if spec is None or spec.loader is None or not path.is_file():
        sys.exit(
            f"{path}: no such script; it is scripts/prepare_hidden_states.py of its repository"
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def its_arguments(script: Any, args: Any) -> Any:
    """What its own parser makes of a plain command line: its defaults, whatever they are."""
    argv, sys.argv = (
        sys.argv,
        [
            "prepare_hidden_states.py",
            f"--target-model-path={args.model}",
            "--data-path=none",
            f"--output-path={args.output}",
            f"--batch-size={args.batch_size}",
            f"--max-length={args.max_length}",
            f"--sglang-attention-backend={args.attention_backend}",
        ],
    )
    try:
        return script.parse_args()
    finally:
        sys.argv = argv


if __name__ == "__main__":
    main()
