"""SGLang's ModelRunner without a scheduler: weights, attention backend and pools are SGLang's; batches
are ours, one ForwardBatch a step, without padding, and nothing of one survives into the next."""

import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from extractor import pages
from extractor.checkpoint import check_files
from extractor.engine import compat
from extractor.engine.base import Engine, EngineInfo, EngineOptions
from extractor.engine.capture import Capture, find_backbone
from extractor.engine.cpu import platform
from extractor.engine.layer_proof import LayerProof, Limits, ProofPlan, Prover, Trial
from extractor.engine.passes import Pass, passes_of
from extractor.engine.rope import SampleRope, unknown_rope
from extractor.engine.selfcheck import PROMPT_TOKENS, SelfCheck, self_check
from extractor.engine.settings import asked_dtype, cpu_multiplies_bfloat16
from extractor.engine.settings import numbers as numbers
from extractor.engine.topk import TopK, watch_wrapper
from extractor.engine.weights import WeightAudit
from extractor.errors import RunError, UsageError
from extractor.model import ModelSpec
from extractor.ranks.place import Place
from extractor.records import Batch, CapturedBatch
from extractor.states import FINAL, States

logger = logging.getLogger(__name__)

# SGLang writes the keys and values of padding tokens to slot 0.
FIRST_SLOT = 1

# A GPU that cannot hold a pass of this many tokens cannot hold the model.
SHORTEST_PASS = 16

# ServerArgs that split a model or its batches in ways that leave a rank's stream a part of the whole,
# or in other ranks' hands: each has one value that is right here.
SINGLE: dict[str, Any] = {
    "pp_size": 1,
    "dp_size": 1,
    "attn_cp_size": 1,
    "dcp_size": 1,
    "moe_dp_size": 1,
    "nnodes": 1,
    "enable_dp_attention": False,
    "enable_two_batch_overlap": False,
    "speculative_algorithm": None,
    "enable_lora": False,
}


def choose_device(wanted: str, place: Place) -> torch.device:
    """--device to this rank's device. Raises UsageError when there is no such GPU."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError("--device cuda: PyTorch sees no CUDA GPU on this machine")
    count = torch.cuda.device_count()
    if place.local_rank >= count:
        raise UsageError(
            f"local rank {place.local_rank} has no GPU of its own: this machine shows {count}; "
            f"start with --nproc-per-node {count} or fewer"
        )
    return torch.device("cuda", place.local_rank)


def prepare_process(device: torch.device, place: Place, verbose: bool = False) -> None:
    """What must be set before SGLang is imported. Call once, first."""
    compat.require_supported()
    # A context that YaRN lengthens is longer than what SGLang reads in a config; ours is in ModelSpec.
    os.environ.setdefault("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")
    if not verbose:  # SGLang speaks of every optional kernel that it does not find
        logging.getLogger("sglang").setLevel(logging.ERROR)
        logging.getLogger("transformers").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", module=r"sglang\.")
    if device.type != "cpu":
        return
    platform.request()
    pages.keep_heap()  # each layer of each pass frees what the next one asks for
    cores = sorted(os.sched_getaffinity(0))
    compat.bind_cores([cores[n % len(cores)] for n in range(place.local_size)], place)
    compat.hide_nccl()
    # Saves a compile of the embedding's mask, 15 seconds on a small machine.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(max(len(cores) // local, 1))


def import_modules(device: torch.device) -> None:
    """Import SGLang, all of its model classes with it: a quarter of a minute and more."""
    if device.type == "cuda":  # what its modules ask of the current GPU, they ask of this one
        torch.cuda.set_device(device)
    compat.import_all()


def check_model(spec: ModelSpec, place: Place, sglang_args: Mapping[str, str]) -> None:
    """Refuse what cannot run, before any weight is read. Raises UsageError."""
    if spec.num_heads % place.tp:
        raise UsageError(
            f"tensor parallelism of {place.tp} does not divide the model's {spec.num_heads} "
            f"attention heads: choose --tp among the divisors of {spec.num_heads}"
        )
    smaller, larger = sorted((spec.num_kv_heads, place.tp))
    if larger % smaller:
        raise UsageError(
            f"tensor parallelism of {place.tp} and the model's {spec.num_kv_heads} key-value heads: "
            "neither divides the other"
        )
    for name, value in compat.typed_args(sglang_args).items():
        if value != SINGLE.get(name, value):
            raise UsageError(
                f"--sglang {name}={value}: not supported here; split the model with --tp, and run "
                "replicas of it by starting more ranks"
            )
    if compat.typed_args(sglang_args).get("load_format") != "dummy":
        check_files(spec.path)
    if rope := unknown_rope(spec.rope):
        raise UsageError(f"{spec.path} has {rope}, whose states are not proved here")
    model_class = compat.model_class(spec.architecture)
    if model_class is None or not compat.has_marks(model_class):
        raise UsageError(
            f"{spec.architecture} has no capture marks in SGLang "
            f"{'.'.join(map(str, compat.installed_version()))}; these do: "
            + ", ".join(compat.architectures_with_marks())
            + " (docs/families.md)"
        )


def applies_window(spec: ModelSpec) -> bool:
    """Whether SGLang's class of the model gives its layers the window that the config names: one that
    does tells SGLang how long it is. Imports SGLang."""
    kind = compat.model_class(spec.architecture)
    return kind is not None and hasattr(kind, "get_attention_sliding_window_size")


class SGLangEngine:
    """The model of one replica, on this rank.

    Process groups must exist already (World.join_replica). Building it loads the weights.
    """

    def __init__(
        self, spec: ModelSpec, states: States, place: Place, options: EngineOptions
    ) -> None:
        self._options = options
        self._longest_pass = options.max_tokens
        self._args = self._server_args(spec, place)
        gpu_id = place.local_rank
        audit = WeightAudit()
        with compat.loading_through(audit.load):
            self._runner = self._build_runner(place.tp_rank, gpu_id)
        self._runner.alloc_memory_pool()
        self._runner.init_attention_backends()
        self._fusion = compat.prepare_fusion(self._runner, self._args)
        self._own_kernels: dict[str, Any] = {}
        self._skips_kv = not options.as_sglang and compat.can_skip_kv(self._runner)
        backbone = find_backbone(self._runner.model)
        if backbone is None:
            raise UsageError(f"{spec.architecture} has no capture marks where they were expected")
        self._backbone, self._spec, self._place = backbone, spec, place
        self._weights = self._settle(audit, place.tp)
        self._rope = SampleRope(backbone)
        if options.device.type == "cuda" and not options.as_sglang:
            self._own_kernels = self._install_kernels()
        self.capture = self._captured(states)
        device = options.device
        self._slots = torch.arange(
            FIRST_SLOT, FIRST_SLOT + self._pool_tokens, dtype=torch.int64, device=device
        )
        self._requests = torch.arange(options.max_sequences, dtype=torch.int64, device=device)
        self._topk = self._make_topk(place) if options.topk else None

    def _build_runner(self, tp_rank: int, gpu_id: int) -> Any:
        """Raises RunError where SGLang refuses the model in a way of its own."""
        try:
            return compat.build_runner(self._args, tp_rank=tp_rank, gpu_id=gpu_id)
        except (ValueError, KeyError, TypeError, AttributeError, NotImplementedError) as error:
            if self._options.verbose:
                raise
            text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise RunError(
                f"SGLang cannot build {self._args.model_path}: {text}; --verbose shows where"
            ) from error

    def _settle(self, audit: WeightAudit, ranks: int) -> str:
        model = self._runner.model
        prefix = next(name for name, each in model.named_modules() if each is self._backbone)
        return audit.settle(
            f"{prefix}." if prefix else "",
            self._spec.num_layers,
            bool(self._options.topk),
            type(model).__name__,
            ranks,
        )

    def _install_kernels(self) -> dict[str, Any]:
        """Put ours in the place of SGLang's where they are faster; what was done, for run.json."""
        from extractor.engine.qk_norm_rope import install

        properties = torch.cuda.get_device_properties(self._options.device)
        return {
            "long_expert_tiles": compat.prefer_long_tiles(properties.shared_memory_per_block_optin),
            "fused_qk_norm_rope": install(self._backbone),
        }

    def _captured(self, states: States) -> Capture:
        """Hooks for these states, and for the final one where top-k logits are to come from it."""
        self._states, names = states, states.names
        if self._options.topk and FINAL not in names:
            names = (*names, FINAL)
        return Capture(self._backbone, States(names, states.num_layers))

    @torch.no_grad()
    def _make_topk(self, place: Place) -> TopK:
        """Raises RunError when this model's logits would not be its own (topk.py)."""
        ids = self._prompt()
        final = self._run(ids, (len(ids),))[FINAL].clone()
        runner = self._runner
        forward_batch = self._forward_batch(ids, (len(ids),), 0)
        positions = self._positions(forward_batch)
        if runner.model_config.model_is_mrope:
            forward_batch.mrope_positions = positions

        def wrapper() -> Any:
            device = self._options.device.type
            with compat.forward_scope(runner, forward_batch), compat.wrapper_scope(device):
                runner.attn_backend.init_forward_metadata(forward_batch)
                return runner.model(forward_batch.input_ids, positions, forward_batch)

        name = type(runner.model).__name__
        seen = watch_wrapper(runner.model, wrapper, name)
        self.capture.take()
        return TopK(self._options.topk, seen, final, name, place.tp)

    @property
    def _pool_tokens(self) -> int:
        return max(self._options.max_tokens, self._options.longest)

    def _server_args(self, spec: ModelSpec, place: Place) -> Any:
        options = self._options
        values: dict[str, Any] = {
            "model_path": str(spec.path),
            "device": options.device.type,
            "tp_size": place.tp,
            "trust_remote_code": options.trust_remote_code,
            "skip_tokenizer_init": True,
            "disable_radix_cache": True,
            "disable_hybrid_swa_memory": True,
            "disable_cuda_graph": True,
            # It serves messages of up to 16 MB, a full pass's are larger; and it compiles at start.
            "disable_custom_all_reduce": True,
            "mem_fraction_static": 0.95,
            "page_size": 1,
            "max_total_tokens": self._pool_tokens,
            "max_running_requests": options.max_sequences,
            "max_prefill_tokens": options.max_tokens,
            "chunked_prefill_size": options.max_tokens,
            "context_length": max(options.longest, 16),
            "random_seed": 0,
            "log_level": "info" if options.verbose else "error",
        }
        given = compat.typed_args(options.sglang_args)
        if asked_dtype(options.sglang_args) is None:
            given.pop("dtype", None)  # auto is what is computed in without it
        if options.device.type == "cpu":
            values |= self._cpu_values(spec.architecture, given)
        values |= compat.fusion_values(given)
        return compat.server_args(values | given)

    def _cpu_values(self, architecture: str, given: Mapping[str, Any]) -> dict[str, Any]:
        from extractor.engine.cpu.attention import attend_as
        from extractor.engine.cpu.runtime import ATTENTION_BACKEND

        values: dict[str, Any] = {"attention_backend": ATTENTION_BACKEND}
        if not cpu_multiplies_bfloat16():
            # Eight times faster there, and exacter; what is stored is rounded once, at the end.
            values["dtype"] = "float32"
        values |= compat.cpu_values(architecture)
        if given.get("ep_size", 1) > 1:
            compat.skip_absent_experts()
        attend_as(values["attention_backend"])
        compat.allow_attention_backend(values["attention_backend"])
        return values

    @cached_property
    def info(self) -> EngineInfo:
        runner, options = self._runner, self._options
        return EngineInfo(
            device=options.device,
            dtype=runner.model_config.dtype,
            max_tokens=options.max_tokens,
            max_sequences=options.max_sequences,
            details={
                "sglang": ".".join(map(str, compat.installed_version())),
                "model_class": type(runner.model).__name__,
                "backbone_class": type(self._backbone).__name__,
                "attention_backend": type(runner.attn_backend).__name__,
                "compute_dtype": str(runner.model_config.dtype).removeprefix("torch."),
                "quantization": runner.model_config.quantization,
                "tp": self._args.tp_size,
                "ep": self._args.ep_size,
                "fused_all_reduce": self._fusion,
                "kv_writes": "of chunks" if self._skips_kv else "all",
                "kv_pool_tokens": runner.max_total_num_tokens,
                "weights": self._weights,
                "rope_by_sample": self._rope.found,
                **self._own_kernels,
            },
        )

    @torch.no_grad()
    def forward(self, batch: Batch) -> CapturedBatch:
        """See Engine.forward. What is longer than a pass may be runs in several: whole sequences
        while they fit, a longer one in chunks, its own keys and values as prefix; its states are
        those of one pass. A GPU whose memory does not suffice makes passes half as long from there
        on; over several tp ranks it raises RunError, as the others wait in mid-pass."""
        while True:
            try:
                return CapturedBatch(batch, self._in_passes(batch))
            except torch.OutOfMemoryError as error:
                why = str(error).splitlines()[0]  # the error itself holds what the pass had made
            self._halve(batch, why)

    def _in_passes(self, batch: Batch) -> dict[str, torch.Tensor]:
        if batch.num_tokens <= self._longest_pass:
            return self._outputs(self._run(batch.input_ids, batch.lengths))
        parts: dict[str, list[torch.Tensor]] = {}
        for each in passes_of(batch.lengths, self._longest_pass):
            states = self._run_pass(each, batch.input_ids)
            for name, state in self._outputs(states).items():
                last = each.tokens.stop == batch.num_tokens
                parts.setdefault(name, []).append(state if last else state.clone())
        return {name: torch.cat(states) for name, states in parts.items()}

    def _halve(self, batch: Batch, why: str) -> None:
        tokens = min(self._longest_pass, batch.num_tokens)
        if self._args.tp_size > 1 or tokens < 2 * SHORTEST_PASS:
            raise RunError(
                f"{batch} is too much for the GPU's memory ({why}); run the same command again with "
                f"--batch-tokens {max(tokens // 2, 1)}: what is written is kept (docs/performance.md)"
            )
        self._longest_pass = tokens // 2
        self.capture.forget()
        if self._options.device.type == "cuda":
            torch.cuda.empty_cache()
        logger.warning(
            "%s was too much for the GPU's memory (%s): passes of at most %d tokens from here on",
            batch, why, self._longest_pass,
        )  # fmt: skip

    def _outputs(self, states: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The states asked for, and with topk what lm_head makes of the final one."""
        asked = {name: states[name] for name in self._states.names}
        return asked if self._topk is None else asked | self._topk(states[FINAL])

    @torch.no_grad()
    def self_check(self) -> SelfCheck:
        """Prove the captured states on a short prompt; all tp ranks call it together. RunError."""
        ids = self._prompt()

        def run() -> dict[str, torch.Tensor]:
            return self._run(ids, (len(ids),))

        return self_check(run, self._backbone, self.capture.states, self._across_ranks)

    @torch.no_grad()
    def layer_proof(self) -> LayerProof | None:
        """Compare a layer of each kind with transformers' (layer_proof.py). All tp ranks call
        it together: each runs the passes, the first one compares. Raises RunError on every rank."""
        first = self._place.tp_rank == 0
        prover = self._prover() if first else None
        plan: ProofPlan = self._from_first(prover.plan if prover else None)
        if plan.skipped:
            return LayerProof(layers={}, skipped=plan.skipped)
        kept, states = (
            self._states,
            States(plan.states(self._spec.num_layers), self._spec.num_layers),
        )
        self.mark(states)
        ids = [self._random_ids(sum(trial.lengths)) for trial in plan.trials]
        seen = [self._try(trial, tokens) for trial, tokens in zip(plan.trials, ids, strict=True)]
        self.mark(kept)
        result: LayerProof | RunError | None = None
        if prover is not None:
            config = self._runner.model_config
            try:
                result = prover.judge(seen, ids, config.dtype, self._args.quantization is not None)
            except RunError as error:
                result = error
        result = self._from_first(result)
        if isinstance(result, RunError):
            raise result
        return result

    def _prover(self) -> Prover:
        overrides = self._args.json_model_override_args
        limits = Limits(longest=self._options.longest, max_tokens=self._options.max_tokens)
        trust = self._options.trust_remote_code
        loaded = self._args.load_format
        return Prover(self._spec, self._options.device, limits, trust, overrides, loaded)

    def _try(self, trial: Trial, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        parts: dict[str, list[torch.Tensor]] = {}
        for each in passes_of(trial.lengths, trial.limit):
            for name, state in self._run_pass(each, ids).items():
                parts.setdefault(name, []).append(state.clone())
        return {name: torch.cat(states) for name, states in parts.items()}

    def _random_ids(self, count: int) -> torch.Tensor:
        """The same on every rank."""
        generator = torch.Generator().manual_seed(count)
        return torch.randint(self._spec.vocab_size, (count,), generator=generator)

    def _from_first(self, value: Any) -> Any:
        """What the first rank of the replica has, on each of its ranks."""
        if self._args.tp_size == 1:
            return value
        held = [value]
        dist.broadcast_object_list(held, 0)
        return held[0]

    def _prompt(self) -> torch.Tensor:
        return torch.arange(1, PROMPT_TOKENS + 1) * 97 % self._runner.model_config.vocab_size

    def _across_ranks(self, state: torch.Tensor) -> float:
        if self._args.tp_size == 1:
            return 0.0
        first = state.float().clone()
        dist.broadcast(first, 0)
        difference = (state.float() - first).norm() / first.norm().clamp_min(1e-30)
        dist.all_reduce(difference, dist.ReduceOp.MAX)
        return float(difference)

    def active_parameters(self) -> int:
        """Weights of the decoder layers that a token meets on this rank: routed experts count by the
        share of them that a token is sent to. For FLOP counts: two a weight and token."""
        text = self._runner.model_config.hf_text_config
        chosen = getattr(text, "num_experts_per_tok", None) or 0
        total = 0
        for name, weight in self._backbone.named_parameters():
            if not name.startswith("layers.") or weight.dim() < 2:
                continue
            routed = weight.dim() == 3 and "experts" in name
            total += weight[0].numel() * chosen if routed else weight.numel()
        return total

    def attention_width(self) -> int:
        """Multiply-adds of a pair of tokens that see each other, in all layers on this rank."""
        config = self._runner.model_config
        text = config.hf_text_config
        if getattr(text, "kv_lora_rank", None):
            width = text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim
        else:
            width = 2 * config.head_dim
        heads = text.num_attention_heads // self._args.tp_size
        return len(self._backbone.layers) * heads * width  # pyright: ignore[reportArgumentType]

    @torch.no_grad()
    def forward_bare(self, batch: Batch) -> None:
        """The backbone's pass and nothing else, once capture.remove() was called: what benchmarks
        compare the whole pipeline with."""
        self._place_kv(whole=True)
        if self._rope.found:
            self._rope.whole = self._each_token(batch.lengths, batch.lengths)
        self._pass(self._forward_batch(batch.input_ids, batch.lengths, 0))

    def _run_pass(self, each: Pass, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """States of one pass of a batch, whose ids are given."""
        whole = (each.whole,) if each.whole else each.lengths
        return self._run(ids[each.tokens], each.lengths, each.prefix, each.more, whole)

    def _run(
        self,
        ids: torch.Tensor,
        lengths: Sequence[int],
        prefix: int = 0,
        more: bool = False,
        whole: Sequence[int] | None = None,
    ) -> dict[str, torch.Tensor]:
        """whole: tokens of each sequence's whole sample, where this is a chunk of it."""
        forward_batch = self._forward_batch(ids, lengths, prefix)
        if self._rope.found:
            self._rope.whole = self._each_token(whole or lengths, lengths)
        if self._options.device.type == "cpu":
            self._runner.attn_backend.more_to_come = more
        self._place_kv(whole=prefix == 0 and not more)
        self._pass(forward_batch)
        return self.capture.take()

    def _place_kv(self, *, whole: bool) -> None:
        if self._skips_kv:
            compat.skip_kv(self._runner, whole)

    def _pass(self, forward_batch: Any) -> None:
        with compat.forward_scope(self._runner, forward_batch):
            self._runner.attn_backend.init_forward_metadata(forward_batch)
            self._backbone(forward_batch.input_ids, self._positions(forward_batch), forward_batch)

    def _positions(self, forward_batch: Any) -> torch.Tensor:
        positions = forward_batch.positions
        # Models with rotary sections for time, height and width give text the same number thrice.
        return positions.expand(3, -1) if self._runner.model_config.model_is_mrope else positions

    def _forward_batch(self, ids: torch.Tensor, lengths: Sequence[int], prefix: int) -> Any:
        """A prefill of whole sequences, or of one sequence's next chunk after prefix tokens.

        Sequence j owns row j of the request table and the batch's tokens own the pool's slots in
        order; every entry that this forward reads, it wrote itself (or the chunk before did)."""
        device = self._options.device
        count, total = len(lengths), len(ids)
        lengths_cpu = torch.tensor(lengths, dtype=torch.int64)
        on_device = self._to_device(torch.cat([ids, lengths_cpu]))
        input_ids, lens = on_device[:total], on_device[total:]
        ends = lens.cumsum(0)
        starts = ends - lens
        requests = self._requests[:count]
        owner = torch.repeat_interleave(requests, lens, output_size=total)
        positions = torch.arange(total, device=device) - starts[owner] + prefix
        slots = self._slots[prefix : prefix + total]
        table = self._runner.req_to_token_pool.req_to_token
        table[owner, positions] = slots.to(table.dtype)
        mode = compat.symbol("sglang.srt.model_executor.forward_batch_info", "ForwardMode")
        hidden = compat.symbol("sglang.srt.model_executor.forward_batch_info", "CaptureHiddenMode")
        kind = compat.symbol("sglang.srt.model_executor.forward_batch_info", "ForwardBatch")
        forward_batch = kind(
            forward_mode=mode.EXTEND,
            batch_size=count,
            input_ids=input_ids,
            req_pool_indices=requests,
            seq_lens=lens + prefix,
            out_cache_loc=slots,
            seq_lens_sum=total + prefix,
            seq_lens_cpu=lengths_cpu + prefix,
            orig_seq_lens=(lens + prefix).to(torch.int32),
            positions=positions,
            extend_num_tokens=total,
            extend_seq_lens=lens.to(torch.int32),
            extend_prefix_lens=torch.full((count,), prefix, dtype=torch.int32, device=device),
            extend_start_loc=starts.to(torch.int32),
            extend_prefix_lens_cpu=[prefix] * count,
            extend_seq_lens_cpu=list(lengths),
            extend_logprob_start_lens_cpu=list(lengths),
            is_prefill_only=True,
            is_extend_in_batch=True,
            spec_algorithm=self._runner.spec_algorithm,
            capture_hidden_mode=hidden.NULL,
        )
        compat.bind_cache_slots(self._runner, forward_batch)
        return forward_batch

    def _each_token(self, values: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """int64 [tokens]: each sequence's value at each of its tokens."""
        counts = torch.tensor(lengths)
        return self._to_device(torch.repeat_interleave(torch.tensor(values), counts))

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._options.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._options.device, non_blocking=True)

    def mark(self, states: States) -> None:
        """Capture these states from now on, instead of those it was built with."""
        self.capture.remove()
        self.capture = self._captured(states)

    def close(self) -> None:
        self.capture.remove()


def build(spec: ModelSpec, states: States, place: Place, options: EngineOptions) -> Engine:
    return SGLangEngine(spec, states, place, options)
