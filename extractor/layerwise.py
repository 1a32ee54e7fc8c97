"""transformers' own model of a checkpoint, with the weights of one module at a time in memory.

The model is built without weights (accelerate), and a part of it is filled from the checkpoint by
transformers' own loading code, so that renamed and fused tensors are read as `from_pretrained` reads
them. To run one decoder layer, the model's own forward runs with every other layer passing its input
on: masks, rotary tables and whatever else a family hands to its layers are made by that family's own
code, and no layer's signature is known here.

This is the reference of `verify`, which needs one layer's memory for a model of any size, and of the
layer proof at the start of a run.
"""

import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.initialization import no_init_weights
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging

from extractor.dequantize import NotPlain, Source, plain
from extractor.model import TEXT_PARTS, config_class, overridden, weight_files

# Ways of quantizing, by their name in config.json, whose formats dequantize.py knows.
DEQUANTIZED = ("fp8", "compressed-tensors")


class NoReference(Exception):
    """transformers cannot serve as the reference for this checkpoint; the text says why."""


class _Enough(Exception):
    """Ends a forward as soon as what was wanted of it is known."""


class LayerByLayer:
    """A checkpoint's model in transformers' classes, filled and run part by part.

    Args:
        path: the checkpoint's folder.
        num_layers: decoder layers, n.
        device: where parts are filled and run.
        trust_remote_code: let the model's own Python code run.
        overrides: a JSON object whose fields replace those of config.json.

    Raises NoReference where transformers has no class for the model, cannot build it, or cannot read
    its weights.
    """

    def __init__(
        self,
        path: Path,
        num_layers: int,
        device: torch.device | str = "cpu",
        trust_remote_code: bool = False,
        overrides: str | None = None,
    ) -> None:
        with _as_no_reference(f"transformers cannot build the model of {path}"):
            self._config = _config_of(path, trust_remote_code, overrides)
            sources = _plain_sources(self._config, _sources(path))
            self._model = _empty_model(self._config, trust_remote_code)
        self._name, self._decoder, self._list = _find_decoder(self._model, num_layers)
        self._embedding = _embedding_of(self._decoder)
        with _as_no_reference("transformers cannot read this checkpoint's tensors"):
            self._loader = _Loader(self._model, sources)
        self.move(device)
        self.rounds_inputs = _rounds_inputs(self._config)
        self._real = [layer.forward for layer in self.layers]
        self._full: list[str] = []

    def move(self, device: torch.device | str) -> None:
        """Fill and run parts on this device from here on."""
        self.device = torch.device(device)
        for module in self._model.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                if not buffer.is_meta:
                    setattr(module, name, buffer.to(self.device))

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The decoder layers; their parameters are on the meta device unless they are filled."""
        return getattr(self._decoder, self._list)

    @property
    def layer_class(self) -> str:
        return type(self.layers[0]).__name__

    @property
    def config(self) -> Any:
        """The language model's own config."""
        return self._decoder.config

    def kinds(self) -> dict[str, list[int]]:
        """Layers by what they are: a short description to the layers' numbers, in order.

        Two layers are of one kind when their modules have the same classes, the same plain attributes
        (windows, scales, numbers of experts: whatever the family keeps on them, but for the layer's
        own number) and the same shapes, and the config gives both the same type."""
        found: dict[Any, list[int]] = {}
        for k, layer in enumerate(self.layers):
            found.setdefault((self._type_of(k), _signature(layer)), []).append(k)
        kinds: dict[str, list[int]] = {}
        for (kind, _), layers in found.items():
            name = kind or self.layer_class
            kinds[name if name not in kinds else f"{name} {layers[0]}"] = layers
        return kinds

    def layer_bytes(self, k: int) -> int:
        """Bytes of a filled layer in float32."""
        return 4 * sum(p.numel() for p in self.layers[k].parameters())

    @contextmanager
    def filled(self, *parts: str) -> Generator[None]:
        """Within it, these parts of the decoder have their weights, in float32. A part is `layers.K`,
        or `rest` for all that lies outside the layers but the embedding, or `embed`, or `head`.

        Raises NoReference naming parameters that no tensor of the checkpoint fills."""
        names = [name for part in parts for name in self._parameters(part)]
        with _as_no_reference("transformers cannot load this checkpoint"):
            self._loader.fill(names, self.device)
        self._full = names
        try:
            yield
        finally:
            self._full = []
            _empty(self._model, names)

    def round_to(self, dtype: torch.dtype) -> None:
        """Turn what is filled into this dtype, but for what the family keeps in float32."""
        kept = [
            *(getattr(self._model, "_keep_in_fp32_modules", None) or ()),
            *(getattr(self._model, "_keep_in_fp32_modules_strict", None) or ()),
        ]
        for name in self._full:
            owner, _, key = name.rpartition(".")
            parameter = getattr(self._model.get_submodule(owner), key)
            if isinstance(parameter, nn.Parameter) and not any(part in name for part in kept):
                parameter.data = parameter.data.to(dtype)

    @torch.no_grad()
    def run_layer(self, k: int, ids: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The stream after layer k for ids [T], given the stream before it [T, H]; float32 [T, H] on
        this device. Computes in state's dtype; the layer must be filled."""
        seen: list[torch.Tensor] = []

        def layer(*given: Any, **named: Any) -> Any:
            output = self._real[k](*_with_state(given, named, state[None]), **named)
            seen.append(output[0] if isinstance(output, tuple) else output)
            raise _Enough

        self._forward(self._decoder, ids, {k: layer}, state)
        return seen[0].reshape(state.shape).float()

    @torch.no_grad()
    def final(self, ids: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """After the final norm, given the last layer's own state [T, H]; float32 [T, H]."""
        output = self._forward(self._decoder, ids, {}, state)
        return output[0].reshape(state.shape).float()

    @torch.no_grad()
    def logits(self, ids: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Logits [T, V] in float32, given the last layer's own state [T, H]; `rest` and `head` must be
        filled."""
        return self._forward(self._model, ids, {}, state).logits[0].float()

    @torch.no_grad()
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """The stream before layer 0 for ids [T]: float32 [T, H]; `embed` and `rest` must be filled."""
        seen: list[torch.Tensor] = []

        def layer(*given: Any, **named: Any) -> Any:
            seen.append((given[0] if given else named["hidden_states"]).clone())
            raise _Enough

        self._forward(self._decoder, ids, {0: layer}, None)
        return seen[0].reshape(len(ids), -1).float()

    def _forward(
        self,
        module: nn.Module,
        ids: torch.Tensor,
        layers: Mapping[int, Callable[..., Any]],
        state: torch.Tensor | None,
    ) -> Any:
        """One forward of the decoder or the whole model; layers without a function of their own pass
        on their input, and the last one gives state."""
        last = len(self.layers) - 1
        # Some families' layers return a tuple, and their loops take its first entry.
        for wrap in (lambda x: x, lambda x: (x,)):  # pyright: ignore[reportUnknownLambdaType]
            with self._layers_as(layers, wrap, state, last), self._embedding_as(state):
                try:
                    return module(input_ids=ids[None].to(self.device), use_cache=False)
                except _Enough:
                    return None
                except (IndexError, TypeError, AttributeError, ValueError, RuntimeError) as error:
                    failure = error
        raise NoReference(f"transformers' {type(module).__name__} does not run: {failure}")

    @contextmanager
    def _layers_as(
        self,
        own: Mapping[int, Callable[..., Any]],
        wrap: Callable[[Any], Any],
        state: torch.Tensor | None,
        last: int,
    ) -> Generator[None]:
        def passing(k: int) -> Callable[..., Any]:
            def forward(*given: Any, **named: Any) -> Any:
                hidden = given[0] if given else named["hidden_states"]
                return wrap(state[None] if k == last and state is not None else hidden)

            return forward

        for k, layer in enumerate(self.layers):
            layer.forward = own.get(k, passing(k))
        try:
            yield
        finally:
            for layer, real in zip(self.layers, self._real, strict=True):
                layer.forward = real

    @contextmanager
    def _embedding_as(self, state: torch.Tensor | None) -> Generator[None]:
        """With a state to go on from, the embedding need not be filled: zeros of its shape come."""
        if state is None:
            yield
            return
        real = self._embedding.forward
        self._embedding.forward = lambda *_, **__: torch.zeros_like(state[None])
        try:
            yield
        finally:
            self._embedding.forward = real

    def _parameters(self, part: str) -> list[str]:
        """Full names of a part's parameters and persistent buffers."""
        base = f"{self._name}." if self._name else ""
        every = self._model.state_dict().keys()
        layers = f"{base}{self._list}."
        embedding = next(n for n, m in self._model.named_modules() if m is self._embedding) + "."
        if part == "embed":
            return [n for n in every if n.startswith(embedding)]
        if part == "head":
            names = [n for n in every if not n.startswith(base) and "lm_head" in n]
            tied = not all(self._loader.has(name) for name in names)
            return names + self._parameters("embed") if tied else names
        if part == "rest":
            outside = (layers, embedding)
            return [n for n in every if n.startswith(base) and not n.startswith(outside)]
        return [n for n in every if n.startswith(f"{base}{self._list}.{part.partition('.')[2]}.")]

    def _type_of(self, k: int) -> str:
        types = getattr(self.config, "layer_types", None)
        return str(types[k]) if types and k < len(types) else ""


def _config_of(path: Path, trust_remote_code: bool, overrides: str | None) -> Any:
    """transformers' config; of a wrapper that it does not know, the language model's own part."""
    raw, _ = PretrainedConfig.get_config_dict(path)
    raw = overridden(raw, overrides)
    if (known := config_class(raw.get("model_type"))) is not None:
        return known.from_dict(raw)
    text = next((raw[k] for k in TEXT_PARTS if isinstance(raw.get(k), dict)), {})
    if (known := config_class(text.get("model_type"))) is not None:
        return known.from_dict({k: v for k, v in text.items() if k != "auto_map"})
    if trust_remote_code and "auto_map" in raw:
        return AutoConfig.from_pretrained(path, trust_remote_code=True)
    raise NoReference(f"transformers has no class for {raw.get('model_type')!r}")


def _plain_sources(config: Any, sources: Sequence[Source]) -> Sequence[Source]:
    """The checkpoint's tensors with plain weights. Raises NoReference for a format that is not known."""
    if not (values := _quantization(config)):
        return sources
    method = str(values.get("quant_method"))
    if method not in DEQUANTIZED:
        raise NoReference(f"its weights are quantized ({method})")
    rows, columns = values.get("weight_block_size") or (128, 128)
    try:
        return plain(sources, (int(rows), int(columns)), _bits(values))
    except NotPlain as error:
        raise NoReference(f"its weights are quantized ({error})") from error


def _quantization(config: Any) -> dict[str, Any]:
    """The config's quantization_config, wherever it stands; empty for a plain checkpoint."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    places = (getattr(each, "quantization_config", None) for each in (config, text))
    given: Any = next((place for place in places if place is not None), {})
    return dict(given if isinstance(given, dict) else given.to_dict())


def _rounds_inputs(config: Any) -> bool:
    """Whether layers quantize their inputs too, so that states carry a noise of some percent."""
    values = _quantization(config)
    groups = (values.get("config_groups") or {}).values()
    return values.get("quant_method") == "fp8" or any(g.get("input_activations") for g in groups)


def _bits(values: dict[str, Any]) -> int:
    """Bits of a packed number in a compressed-tensors config; every group must have the same."""
    groups = [g.get("weights") or {} for g in (values.get("config_groups") or {}).values()]
    bits = {int(group["num_bits"]) for group in groups if group.get("num_bits")}
    if len(bits) > 1:
        raise NoReference(f"its weights are quantized to {sorted(bits)} bits")
    return bits.pop() if bits else 4


def _empty_model(config: Any, trust_remote_code: bool) -> Any:
    kinds: list[Any] = [AutoModelForCausalLM, AutoModelForImageTextToText]
    known = [kind for kind in kinds if type(config) in kind._model_mapping]
    for each in (config, getattr(config, "text_config", None)):  # one expert at a time is exact
        if each is not None:
            each._experts_implementation = "eager"
    with init_empty_weights(include_buffers=False), no_init_weights():
        model = (known or kinds)[0].from_config(
            config, trust_remote_code=trust_remote_code, dtype=torch.float32
        )
    return model.eval()


def _find_decoder(model: nn.Module, num_layers: int) -> tuple[str, nn.Module, str]:
    """The module with an embedding and a list of num_layers layers; its name first, the list's last."""
    found = [
        (name, module, child)
        for name, module in model.named_modules()
        if any(isinstance(each, nn.Embedding) for each in module.children())
        for child, layers in module.named_children()
        if isinstance(layers, nn.ModuleList) and len(layers) == num_layers
    ]
    if not found:
        raise NoReference(f"no {num_layers} decoder layers in {type(model).__name__}")
    return min(found, key=lambda item: ("vis" in item[0], len(item[0])))


def _embedding_of(decoder: Any) -> nn.Module:
    try:
        return decoder.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return next(m for m in decoder.children() if isinstance(m, nn.Embedding))


def _signature(layer: nn.Module) -> tuple[Any, ...]:
    parts: list[Any] = []
    for name, module in layer.named_modules():
        plain = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, int | float | str | bool | None)
            and not key.startswith("_")
            and key not in ("layer_idx", "layer_id", "layer_number", "training")
        }
        parts.append((name, type(module).__name__, tuple(sorted(plain.items(), key=repr))))
    shapes = tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())
    return (*parts, shapes)


def _with_state(given: tuple[Any, ...], named: dict[str, Any], state: torch.Tensor) -> Any:
    """The arguments of a layer with its hidden states replaced; named is changed in place."""
    if given:
        return (state, *given[1:])
    named["hidden_states"] = state
    return ()


# Weights --------------------------------------------------------------------------------------------
class _Loader:
    """Fills parameters of a model from a checkpoint by transformers' own conversion rules."""

    def __init__(self, model: Any, sources: Sequence[Source]) -> None:
        self._model = model
        self._rules: Any = get_model_conversion_mapping(model, None, None) or []
        self._sources = _by_target(model, _without_wrapper(model, sources), self._rules)

    def has(self, name: str) -> bool:
        """Whether a tensor of the checkpoint goes into this parameter."""
        return name in self._sources

    def fill(self, names: Sequence[str], device: torch.device) -> None:
        """Raises NoReference naming parameters that no tensor fills."""
        wanted = {s.name: s for name in names for s in self._sources.get(name, ())}
        config = LoadStateDictConfig(
            device_map={"": device},
            dtype=torch.float32,
            weight_mapping=self._rules,
        )
        # Before 5.19 it wants a plan of tensor parallelism too.
        parameters = inspect.signature(convert_and_load_state_dict_in_model).parameters
        more: dict[str, Any] = {"tp_plan": None} if "tp_plan" in parameters else {}
        tensors = {name: source.open() for name, source in wanted.items()}
        with _quiet():
            convert_and_load_state_dict_in_model(self._model, tensors, config, **more)
        _tie_head(self._model, names)
        have = self._model.state_dict()
        if missing := [name for name in names if have[name].is_meta]:
            raise NoReference(f"no tensor of the checkpoint fills {', '.join(missing[:4])}")


def _by_target(model: Any, sources: Sequence[Source], rules: Sequence[Any]) -> Any:
    """Parameter name to the tensors of the checkpoint that it is made of."""
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {p: rule for rule in converters for p in rule.source_patterns}
    targets = model.state_dict()
    found: dict[str, list[Source]] = {}
    for source in sources:
        name, pattern = rename_source_key(
            source.name, renamings, converters, model.base_model_prefix, targets
        )
        if name not in targets and source.name in targets:
            name, pattern = source.name, None
        found.setdefault(name, []).append(source)
        # A converter may make several parameters of one tensor; they are loaded together.
        others = by_pattern[pattern].target_patterns if pattern else ()
        first = others[0] if others else ""
        for other in others[1:]:
            found.setdefault(name.replace(first, other), []).append(source)
    return found


def _without_wrapper(model: Any, sources: Sequence[Source]) -> Sequence[Source]:
    """The same tensors under the language model's own names, where a wrapper's prefix stands before
    these and the wrapper is not what was built."""
    first = next(iter(model.state_dict()))
    prefixes = [s.name.removesuffix(first) for s in sources if s.name.endswith(f".{first}")]
    if any(source.name == first for source in sources) or len(prefixes) != 1:
        return sources
    return [Source(source.name.removeprefix(prefixes[0]), source.open) for source in sources]


def _sources(path: Path) -> list[Source]:
    """Every tensor of the checkpoint, not read yet."""
    found: list[Source] = []
    for file in weight_files(path):
        if file.suffix == ".safetensors":
            handle = safe_open(file, "pt")
            found += [Source(n, lambda h=handle, n=n: h.get_slice(n)) for n in handle.keys()]  # noqa: SIM118
        else:
            tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            found += [Source(n, lambda t=t: t) for n, t in tensors.items()]
    return found


def _tie_head(model: Any, names: Sequence[str]) -> None:
    """A head without a tensor of its own is the embedding."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or not any("lm_head" in name for name in names):
        return
    if head.weight.is_meta and not embedding.weight.is_meta:
        head.weight = embedding.weight


def _empty(model: nn.Module, names: Sequence[str]) -> None:
    """Back to parameters without storage."""
    for name in names:
        owner, _, key = name.rpartition(".")
        module: Any = model.get_submodule(owner)
        value = getattr(module, key)
        if value is None or value.is_meta:
            continue
        meta = torch.empty_like(value, device="meta", dtype=torch.float32)
        setattr(module, key, nn.Parameter(meta, False) if isinstance(value, nn.Parameter) else meta)


@contextmanager
def _as_no_reference(what: str) -> Generator[None]:
    """transformers' loading code raises a dozen kinds; each says in its own words what it lacks."""
    try:
        yield
    except NoReference:
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        raise NoReference(f"{what}: {type(error).__name__}: {text}") from error


@contextmanager
def _quiet() -> Generator[None]:
    """Without the bars that transformers draws while it loads."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
