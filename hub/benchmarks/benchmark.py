"""Run with: kernels benchmark <repo>"""

import torch
from kernels.benchmark import Benchmark


class AttentionBenchmark(Benchmark):
    """One token of four sequences over 1024 cached tokens: 32 query heads, 8 key heads of 128."""

    seed = 0

    def setup(self):
        dtype = torch.float32 if self.device == "cpu" else torch.bfloat16
        self.query = torch.randn(4, 32, 1, 128, device=self.device, dtype=dtype)
        self.key = torch.randn(4, 8, 1025, 128, device=self.device, dtype=dtype)
        self.value = torch.randn_like(self.key)
        self.module = torch.nn.Identity()

    def benchmark_attention(self):
        self.out, _ = self.kernel.tree_attention_forward(self.module, self.query, self.key, self.value, None)

    def verify_attention(self):
        expected = torch.nn.functional.scaled_dot_product_attention(self.query, self.key, self.value, enable_gqa=True)
        return expected.transpose(1, 2)
