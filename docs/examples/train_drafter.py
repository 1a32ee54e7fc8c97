"""Train a small EAGLE-3-style drafter on a folder of hidden states, on a CPU or a GPU.

    torchrun --nproc-per-node 1 launch/extract.py --model SmolLM2 --data rows.jsonl --output OUT
    python docs/examples/train_drafter.py OUT --steps 60

It shows the parts that every trainer on these files has: which states go where, what is shifted against
what, and how the loader is fed. The drafter is one decoder layer that sees, at position t, three states
of the target at t and the embedding of token t+1, and learns the target's distribution of token t+2,
which is lm_head of the target's final state at t+1. Nothing on disk is shifted; all shifts are below.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from safetensors import safe_open
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from extractor.dataset import HiddenStates, LengthBatchSampler, Pad

Batch = dict[str, torch.Tensor]


class Drafter(nn.Module):
    """fc(three states) and the next token's embedding, through one decoder layer, to logits over a
    draft vocabulary."""

    def __init__(self, embedding: torch.Tensor, kept: torch.Tensor, states: int, heads: int = 9):
        super().__init__()
        hidden = embedding.shape[1]
        self.register_buffer("embedding", embedding)
        self.fc = nn.Linear(states * hidden, hidden, bias=False)
        self.norm_token, self.norm_state = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv = nn.Linear(2 * hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.norm_mlp = nn.RMSNorm(hidden)
        self.up, self.gate = (nn.Linear(hidden, 3 * hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * hidden, hidden, bias=False)
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, len(kept), bias=False)
        self.head.weight.data.copy_(embedding[kept])  # SmolLM2 ties its head to its embedding
        self.heads = heads

    def forward(self, aux: torch.Tensor, next_ids: torch.Tensor) -> torch.Tensor:
        """aux [B, L, states * H], next_ids [B, L] to logits [B, L, draft vocabulary].

        Padding is at the end and attention is causal, so no token sees any."""
        stream = self.fc(aux)
        token = functional.embedding(next_ids, self.embedding)
        both = torch.cat([self.norm_token(token), self.norm_state(stream)], dim=-1)
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(both).chunk(3, dim=-1)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        stream = stream + self.out(attended.transpose(1, 2).flatten(2))
        inner = self.norm_mlp(stream)
        stream = stream + self.down(functional.silu(self.gate(inner)) * self.up(inner))
        return self.head(self.norm(stream))


def loss_of(drafter: nn.Module, batch: Batch, head: torch.Tensor) -> torch.Tensor:
    """Cross-entropy against the target's own distribution, over the draft vocabulary, where the token
    that is predicted is supervised. head: the target's lm_head rows of that vocabulary."""
    ids, mask = batch["input_ids"], batch["loss_mask"]
    logits = drafter(batch["aux"][:, :-2], ids[:, 1:-1])  # states at t, token t+1 ...
    with torch.no_grad():
        target = (batch["target"][:, 1:-1] @ head.T).softmax(-1)  # ... against p(token t+2)
    supervised = mask[:, 2:].float()
    each = -(target * logits.log_softmax(-1)).sum(-1)
    return (each * supervised).sum() / supervised.sum().clamp(min=1)


def embedding_of(model: Path) -> torch.Tensor:
    """The target's input embedding, f32 [vocabulary, H]."""
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (safe_open is no dict)
                if name.endswith("embed_tokens.weight"):
                    return tensors.get_tensor(name).float()
    raise SystemExit(f"{model}: no embed_tokens.weight in its safetensors files")


def epochs(loader: DataLoader[Batch]) -> Iterator[Batch]:
    while True:
        yield from loader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="folder that extract wrote, native layout")
    parser.add_argument("--model", type=Path, help="the target; default: the folder's own")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--cpu", action="store_true", help="leave a GPU alone")
    options = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator(cpu=options.cpu)
    stored = HiddenStates(options.output).run["layers"]
    aux = [name for name in stored if name != "final"][:3]
    data = HiddenStates(
        options.output, {"aux": aux, "target": ("final",)}, dtype=torch.float32, max_tokens=1024
    )
    embedding = embedding_of(options.model or Path(data.run["model"]["path"]))
    # A draft vocabulary, as EAGLE-3 has one: here simply the ids that occur.
    kept = torch.cat([data[i]["input_ids"] for i in range(len(data))]).unique()
    loader = DataLoader(
        data,
        batch_sampler=LengthBatchSampler(data.lengths, max_tokens=options.batch_tokens),
        collate_fn=Pad(),
    )
    drafter = Drafter(embedding, kept, len(aux))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=options.lr)
    drafter, optimizer, loader = accelerator.prepare(drafter, optimizer, loader)
    head = embedding[kept].to(accelerator.device)
    accelerator.print(f"{data}\ndraft vocabulary: {len(kept):,} ids")

    losses: list[float] = []
    for step, batch in zip(range(options.steps), epochs(loader), strict=False):
        loss = loss_of(drafter, batch, head)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 10 == 0 or step == options.steps - 1:
            accelerator.print(f"step {step:4}  loss {losses[-1]:.3f}")
    window = max(len(losses) // 6, 1)
    first, last = sum(losses[:window]) / window, sum(losses[-window:]) / window
    accelerator.print(json.dumps({"first": round(first, 3), "last": round(last, 3)}))


if __name__ == "__main__":
    main()
