"""A short test of a built kernel: attention against torch's own, on the best device of the machine."""

import pytest
import specmemo
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("queries", [1, 5, 40])
def test_attention_is_sdpa(queries):
    torch.manual_seed(0)
    query = torch.randn(2, 4, queries, 64, device=DEVICE)
    key, value = torch.randn(2, 2, 2, 40, 64, device=DEVICE)
    module = torch.nn.Identity()
    out, weights = specmemo.tree_attention_forward(module, query, key, value, None, scaling=0.1)
    mask = torch.ones(queries, 40, dtype=torch.bool, device=DEVICE).tril(40 - queries)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=0.1, enable_gqa=True
    )
    assert weights is None
    torch.testing.assert_close(out, expected.transpose(1, 2), atol=1e-4, rtol=1e-4)


def test_norm():
    x, weight = torch.randn(3, 64, device=DEVICE), torch.randn(64, device=DEVICE)
    expected = torch.nn.functional.rms_norm(x, (64,), weight, 1e-6)
    torch.testing.assert_close(specmemo.rms_norm(x, weight, eps=1e-6), expected, atol=1e-5, rtol=1e-5)
