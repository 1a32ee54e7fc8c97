"""The whole of transformers' model at once, as from_pretrained loads it: what tests compare with."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from extractor.verbs.reference import FLOOR, Judgement, Tensors, judge, logprobs


class Reference:
    """The states of one checkpoint by transformers, in float32 and in bfloat16.

    A model that does not fit on one device is spread over all of them, the host and the disk by
    accelerate's device_map.

    Args:
        path: the checkpoint's folder.
        device: "cpu", "cuda", or "auto" for accelerate's device_map.
    """

    def __init__(self, path: Path, device: str = "cpu", trust_remote_code: bool = False) -> None:
        self._path, self._device, self._trust = path, device, trust_remote_code
        self._models: dict[torch.dtype, Any] = {}

    def states(self, ids: torch.Tensor, dtype: torch.dtype = torch.float32) -> Tensors:
        """embed, 0 .. n-1 and final for ids [T]: float32 [T, H] each, on the CPU."""
        model = self._model(dtype)
        outputs: list[torch.Tensor] = []
        hooks = [
            layer.register_forward_hook(
                lambda _m, _a, out: outputs.append(out[0] if isinstance(out, tuple) else out)
            )
            for layer in _layers(model)
        ]
        first = next(model.parameters()).device
        with torch.no_grad():
            result = model(ids.unsqueeze(0).to(first), output_hidden_states=True, use_cache=False)
        for hook in hooks:
            hook.remove()
        width = outputs[0].shape[-1]
        named = {str(i): out.reshape(-1, width) for i, out in enumerate(outputs)}
        named["embed"] = result.hidden_states[0][0]
        named["final"] = result.hidden_states[-1][0]
        return {name: state.float().cpu() for name, state in named.items()}

    def logprobs(
        self, ids: torch.Tensor, chosen: torch.Tensor, dtype: torch.dtype = torch.float32
    ) -> Tensors:
        """Of ids [T] and chosen token ids [T, K]: their log-probabilities as "topk", the same a row
        late and a row early as "row-1" and "row+1", and the K largest as "best"; float32 [T, K], on
        the CPU."""
        model = self._model(dtype)
        first = next(model.parameters()).device
        with torch.no_grad():
            logits = model(ids.unsqueeze(0).to(first), use_cache=False).logits[0].float().cpu()
        return logprobs(logits, chosen)

    def judge(self, ids: torch.Tensor, states: Tensors, floor: float = FLOOR) -> list[Judgement]:
        """States [T, H] by name against those of ids [T]."""
        exact = self.states(ids)
        rounded = self.states(ids, torch.bfloat16)
        return judge(states, exact, rounded, floor)

    def forget(self) -> None:
        """Let the weights go, of both precisions."""
        self._models.clear()

    def _model(self, dtype: torch.dtype) -> Any:
        if dtype not in self._models:
            spread = {"device_map": "auto"} if self._device == "auto" else {}
            model = AutoModelForCausalLM.from_pretrained(
                self._path, dtype=dtype, trust_remote_code=self._trust, **spread
            )
            if self._device != "auto":
                model = model.to(torch.device(self._device))  # pyright: ignore[reportArgumentType]
            self._models[dtype] = model.eval()
        return self._models[dtype]


def _layers(model: Any) -> Any:
    """The decoder layers, also of a multimodal wrapper."""
    for path in ("model.layers", "model.language_model.layers", "language_model.model.layers"):
        module = model
        for part in path.split("."):
            module = getattr(module, part, None)
        if module is not None:
            return module
    raise ValueError(f"no decoder layers found in {type(model).__name__}")


def _layers(model: Any) -> Any:
    """The decoder layers, also of a multimodal wrapper."""
    for path in ("model.layers", "model.language_model.layers", "language_model.model.layers"):
        module = model
        for part in path.split("."):
            module = getattr(module, part, None)
        if module is not None:
            return module
    raise ValueError(f"no decoder layers found in {type(model).__name__}")
