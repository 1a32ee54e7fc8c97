"""A decoder of plain PyTorch with the seams of SGLang's: marks, a residual kept beside the branch and
added to in place, states handed out as a list or packed."""

from typing import Any

import torch
from torch import nn

LAYERS, WIDTH, VOCABULARY = 5, 16, 97


class Norm(nn.Module):
    """norm(x) or norm(x, residual), which adds in place and returns (normed, residual)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH).uniform_(0.7, 1.3))

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        stream = x if residual is None else residual.add_(x)
        normed = stream / stream.pow(2).mean(-1, keepdim=True).sqrt() * self.weight
        return normed if residual is None else (normed, residual)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.middle = Norm(), Norm()
        self.attention = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(
        self, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual, x = hidden_states, self.input_layernorm(hidden_states)
        else:
            x, residual = self.input_layernorm(hidden_states, residual)
        x, residual = self.middle(self.attention(x).tanh(), residual)
        return self.mlp(x).tanh(), residual


class Backbone(nn.Module):
    """Args:
    marks: "list" or "layers": where it reads its marks.
    packed: hands states out as one [tokens, K * width].
    unsummed: hands out the branch without the residual.
    """

    def __init__(
        self, marks: str = "list", *, packed: bool = False, unsummed: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.norm = Norm()
        self.layers_to_capture: list[int] = []
        self.marks, self.packed, self.unsummed = marks, packed, unsummed

    def forward(self, ids: torch.Tensor) -> Any:
        hidden, residual, aux = self.embed_tokens(ids), None, []
        for index, layer in enumerate(self.layers):
            if self._marked(index, layer):
                alone = residual is None or self.unsummed
                aux.append(hidden.clone() if alone else hidden + residual)
            hidden, residual = layer(hidden_states=hidden, residual=residual)
        hidden, _ = self.norm(hidden, residual)
        if not aux:
            return hidden
        return hidden, torch.cat(aux, -1) if self.packed else aux

    def _marked(self, index: int, layer: nn.Module) -> bool:
        if self.marks == "list":
            return index in self.layers_to_capture
        return bool(getattr(layer, "_is_layer_to_capture", False))

    @torch.no_grad()
    def truth(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Every state, computed without marks, hooks or storage shared between layers."""
        stream = self.embed_tokens(ids)
        states = {"embed": stream}
        for index, layer in enumerate(self.layers):
            middle = stream + layer.attention(layer.input_layernorm(stream)).tanh()
            stream = middle + layer.mlp(layer.middle(middle)).tanh()
            states[str(index)] = stream
        return states | {"final": self.norm(stream)}


class Gemma3TextModel(Backbone):
    """Named as the one whose marks are known to be wrong."""

    def __init__(self) -> None:
        super().__init__(unsummed=True)
