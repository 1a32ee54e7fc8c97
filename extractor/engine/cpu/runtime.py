"""The CPU platform's class. SGLang loads it in the midst of its own import, so it imports little."""

import torch
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from extractor.engine import compat

ATTENTION_BACKEND = "extractor_prefill"


class CpuPlatform(SRTPlatform):
    """PyTorch's native kernels, gloo, and the attention of attention.py."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def get_device(self, device_id: int | None = None) -> str:
        return "cpu"

    def get_device_total_memory(self, device_id: int = 0) -> int:
        return 1 << 40  # the KV pool's size is always given, never derived from this

    def get_current_memory_usage(self, device: torch.device | None = None) -> float:
        return 0.0

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_torch_distributed_backend_str(self) -> str:
        return "gloo"

    def supports_fp8(self) -> bool:
        return False

    def support_cuda_graph(self) -> bool:
        return False

    def support_piecewise_cuda_graph(self) -> bool:
        return False

    def get_mha_kv_pool_cls(self) -> type:
        return compat.cpu_pool_classes().mha

    def get_mla_kv_pool_cls(self) -> type:
        return compat.cpu_pool_classes().mla

    def get_paged_allocator_cls(self) -> type | None:
        return compat.cpu_pool_classes().allocator
