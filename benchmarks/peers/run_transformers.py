"""The loop that most dumpers are: transformers, one sample a forward, `.cpu()`, `torch.save`.

They call the whole model and throw its logits away; --backbone calls what is under lm_head alone,
which is the most that such a loop can reach.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from benchmarks.peers import common


def main() -> None:
    parser = common.parser("transformers, batch 1, torch.save")
    parser.add_argument("--backbone", action="store_true", help="without lm_head")
    args = parser.parse_args()
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
        settings={
            "batch": 1,
            "class": type(model).__name__,
            "attention": model.config._attn_implementation,
        },
    )


def build(args: argparse.Namespace) -> Any:
    """The model, or its backbone, with random weights, made where it will run."""
    config = AutoConfig.from_pretrained(args.model)
    kind = AutoModel if args.backbone else AutoModelForCausalLM
    with torch.device(args.device):
        model = kind.from_config(config, dtype=torch.bfloat16)
    return model.eval()


if __name__ == "__main__":
    main()
