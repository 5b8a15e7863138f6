"""vLLM worker that verifies draft trees: ``worker_cls="specmemo_kernels.integrations.vllm.worker.TreeWorker"``."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from specmemo_kernels.integrations.vllm import register
from specmemo_kernels.integrations.vllm.runner import TreeRunner
from specmemo_kernels.integrations.vllm.versions import unsupported_version

if current_platform.is_cpu():
    from vllm.v1.worker import cpu_worker
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner as BaseRunner
    from vllm.v1.worker.cpu_worker import CPUWorker as BaseWorker
else:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as BaseRunner
    from vllm.v1.worker.gpu_worker import Worker as BaseWorker


class TreeModelRunner(TreeRunner, BaseRunner):
    """vLLM's model runner with draft trees."""


class TreeWorker(BaseWorker):
    """vLLM's worker with a :class:`TreeModelRunner` and attention backend ``CUSTOM``."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        problem = unsupported_version()
        if problem is not None:
            raise RuntimeError(problem)
        register()
        chosen = vllm_config.attention_config.backend
        if chosen not in (None, AttentionBackendEnum.CUSTOM):
            raise ValueError(
                f"attention backend {chosen.name} can't verify draft trees: leave it out, or pass CUSTOM (specmemo)"
            )
        vllm_config.attention_config.backend = AttentionBackendEnum.CUSTOM
        super().__init__(vllm_config, *args, **kwargs)
        if self.use_v2_model_runner:
            raise NotImplementedError("draft trees need model runner V1: unset VLLM_USE_V2_MODEL_RUNNER")

    def init_device(self) -> None:
        if not current_platform.is_cpu():
            super().init_device()
            return
        original = cpu_worker.CPUModelRunner
        cpu_worker.CPUModelRunner = TreeModelRunner  # the name by which vLLM's init_device creates it
        try:
            super().init_device()
        finally:
            cpu_worker.CPUModelRunner = original

    def _make_model_runner(self) -> Any:
        return TreeModelRunner(self.vllm_config, self.device)
