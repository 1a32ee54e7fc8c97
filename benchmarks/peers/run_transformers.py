"""The loop that most dumpers are: transformers, one sample a forward, `.cpu()`, `torch.save`.

The backbone alone is called, so no logits are computed and thrown away: kinder than most of them.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel

from benchmarks.peers import common


def main() -> None:
    args = common.parser("transformers, batch 1, torch.save").parse_args()
    rows, keep = common.read_rows(args.rows), common.layers(args.layers)
    model = build(args)

    @torch.no_grad()
    def one_pass(output: Path) -> None:
        for number, ids in enumerate(rows):
            row = torch.tensor([ids], device=args.device)
            states = model(input_ids=row, output_hidden_states=True, use_cache=False).hidden_states
            # transformers' [0] is the embedding, and its last is after the final norm.
            data: dict[str, Any] = {
                "input_ids": torch.tensor(ids),
                "aux_hidden_states": torch.cat([states[k + 1][0] for k in keep], dim=-1).cpu(),
                "hidden_states": states[-1][0].cpu(),
            }
            torch.save(data, output / f"{number}.pt")

    common.measure(
        args,
        rows,
        one_pass,
        files="*.pt",
        packages=("transformers",),
        settings={"batch": 1, "attention": model.config._attn_implementation},
    )


def build(args: argparse.Namespace) -> Any:
    """The backbone with random weights, made where it will run."""
    config = AutoConfig.from_pretrained(args.model)
    with torch.device(args.device):
        model = AutoModel.from_config(config, dtype=torch.bfloat16)
    return model.eval()


if __name__ == "__main__":
    main()
