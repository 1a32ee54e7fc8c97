"""vLLM's own extraction: `LLM`, speculative method `extract_hidden_states`, its example connector.

A safetensors file a sample, of the layers and the last one, written by the connector's own threads. Its
lock files say when one is whole, and a pass ends with the last. `--bare` runs the same engine and
extracts nothing. vLLM counts the output of layer k as k + 1; its last state is before the final norm.
"""

import fcntl
import json
import os
from pathlib import Path
from typing import Any

# Else engine and client each pick the start method by what happens to be imported already.
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
# Sampling is no part of what is measured, and FlashInfer's wants a package of its own.
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

from vllm import LLM, SamplingParams, TokensPrompt  # pyright: ignore[reportMissingImports]

from benchmarks.peers import common


def main() -> None:
    parser = common.parser("vLLM, extract_hidden_states")
    parser.add_argument("--bare", action="store_true", help="extract nothing")
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=JSON", help="LLM's own")
    args = parser.parse_args()
    rows = common.read_rows(args.rows)
    config = json.loads((Path(args.model) / "config.json").read_text())
    ids = [*(k + 1 for k in common.layers(args.layers)), config["num_hidden_layers"]]
    settings: dict[str, Any] = {
        "max_num_batched_tokens": args.batch_tokens,
        "max_model_len": max(map(len, rows)) + 8,
        "enforce_eager": True,
        # With it the second pass over the same rows would find them computed, and states cut short.
        "enable_prefix_caching": False,
        **{key: json.loads(value) for key, value in (item.split("=", 1) for item in args.set)},
    }
    extra: dict[str, Any] = {}
    if not args.bare:
        extra = {
            "speculative_config": {
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}},
            },
            "kv_transfer_config": {
                "kv_connector": "ExampleHiddenStatesConnector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {"shared_storage_path": str(args.output)},
            },
        }
    llm = LLM(
        model=args.model,
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        **settings,
        **extra,
    )
    prompts = [TokensPrompt(prompt_token_ids=row) for row in rows]
    sampling = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)

    def one_pass(output: Path) -> None:
        del output  # the connector was told at the start
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        if not args.bare:
            for done in outputs:
                wait_for(done.kv_transfer_params["hidden_states_path"])

    common.measure(
        args,
        rows,
        one_pass,
        files=None if args.bare else "*.safetensors",
        packages=("vllm", "transformers", "safetensors"),
        settings=settings | {"layers_in_its_numbers": [] if args.bare else ids},
    )


def wait_for(path: str) -> None:
    """Until this file is closed: the connector locks it before the client learns its name."""
    with Path(path + ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)


if __name__ == "__main__":
    main()
