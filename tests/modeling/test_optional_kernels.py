"""The kernels of flash-linear-attention and AdaSplash, which need CUDA: what they are given, and the formula."""

import sys
from types import SimpleNamespace

import entmax
import pytest
import torch

from modeling_nlq import linear_nlq
from modeling_nlq.cache_nlq import LinearState
from modeling_nlq.kernels import optional
from modeling_nlq.linear_nlq import LinearInputs, chunked_form, linear_attention


def gated_linear_attention(q, k, v, g=None, scale=None, initial_state=None, output_final_state=False):
    """`fla.ops.simple_gla.chunk_simple_gla` token by token: (batch, tokens, heads, width) in and out."""
    state = q.new_zeros(*q.shape[::2], q.shape[3], v.shape[3]) if initial_state is None else initial_state
    outputs = []
    for index in range(q.shape[1]):
        decay = 1.0 if g is None else g[:, index].exp()[..., None, None]
        state = decay * state + k[:, index, :, :, None] * v[:, index, :, None, :]
        outputs.append(scale * (q[:, index, :, None, :] @ state).squeeze(-2))
    return torch.stack(outputs, dim=1), state if output_final_state else None


class TestKernels:
    """Kernels need CUDA. What is handed to them is tested on functions that compute the same."""

    @pytest.mark.parametrize("rotated", [False, True], ids=["", "rotary"])
    @pytest.mark.parametrize("decay", [None, "learned"])
    def test_what_flash_linear_attention_is_given(self, decay, rotated, monkeypatch):
        for name in ("fla", "fla.ops", "fla.ops.simple_gla"):
            monkeypatch.setitem(sys.modules, name, SimpleNamespace(chunk_simple_gla=gated_linear_attention))
        query = torch.randn(2, 2, 3, 7, 4, dtype=torch.float64).exp().requires_grad_()
        key, value = (torch.randn(2, 2, 7, 4, dtype=torch.float64).requires_grad_() for _ in range(2))
        is_valid = torch.ones(2, 7, dtype=torch.bool)
        is_valid[0, :3] = is_valid[1, 5] = False
        logits = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
        positive = key.exp() * is_valid[:, None, :, None]
        inputs = LinearInputs(
            query=query,
            key=positive,
            rotated_query=query.roll(1, -1) if rotated else query,
            rotated_key=positive.roll(1, -1) if rotated else positive,
            value=value,
            count=is_valid.cumsum(-1),
            is_valid=is_valid,
            document_start=None,
            log_decay=None if decay is None else torch.nn.functional.logsigmoid(logits),
        )
        state = LinearState(torch.randn(2, 2, 4, 4, dtype=torch.float64), torch.rand(2, 2, 4, dtype=torch.float64))
        leaves = [query, key, value] if decay is None else [query, key, value, logits]
        for before in (None, state):
            results = []
            for form in (chunked_form, optional.kernel_form):
                output, after = form(inputs, before)
                total = output.square().sum() + sum(part.square().sum() for part in after)
                results.append([output, *after, *torch.autograd.grad(total, leaves, retain_graph=True)])
            for expected, found in zip(*results):
                torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)

    @pytest.mark.gpu
    def test_flash_linear_attention(self):
        if not optional.HAS_FLA:
            pytest.skip("flash-linear-attention is not installed")
        query, key, value = (torch.randn(2, 4, 200, 64, device="cuda") for _ in range(3))
        log_decay = linear_nlq.fixed_log_decay(4).float().cuda()
        expected, _ = linear_attention(*(states.cpu() for states in (query, key, value)), None, 0.125, log_decay.cpu())
        found, _ = linear_attention(query, key, value, None, 0.125, log_decay)
        torch.testing.assert_close(found.cpu(), expected, rtol=2e-2, atol=2e-3)

    @pytest.mark.parametrize("length, is_nonempty", [(64, True), (128, True), (96, False), (32, False)])
    def test_what_adasplash_is_given(self, length, is_nonempty, make_model, monkeypatch):
        """AdaSplash gets inputs that pass its own assertions, and the result is that of the formula."""
        calls = []

        def adasplash(query, key, value, is_causal):
            assert is_causal and all(states.is_contiguous() for states in (query, key, value))
            assert query.shape == key.shape == value.shape and query.shape[2] & (query.shape[2] - 1) == 0
            calls.append(query.shape)
            scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(
                ~torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).tril(), -1e4
            )
            return entmax.entmax15(scores, dim=-1) @ value

        sizes = {"hidden_size": 64, "max_position_embeddings": 128, "num_key_value_heads": 2, "attention_scaling": 0.6}
        model = make_model(attention_activation="entmax15", query_projection="linear", implementation="nlq_sparse", **sizes)
        tokens = torch.randint(13, (2, length))
        expected = model(tokens, use_cache=False).logits
        monkeypatch.setattr(optional, "HAS_ADASPLASH", True)
        monkeypatch.setitem(sys.modules, "adasplash", SimpleNamespace(adasplash=adasplash))
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        found = model(tokens, use_cache=False).logits
        monkeypatch.undo()
        assert bool(calls) == is_nonempty
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

    @pytest.mark.gpu
    def test_adasplash(self, make_model):
        pytest.importorskip("adasplash")
        sizes = {"hidden_size": 64, "max_position_embeddings": 128}
        model = make_model(attention_activation="entmax15", implementation="nlq", **sizes).cuda()
        tokens = torch.randint(13, (2, 128), device="cuda")
        found = model(tokens).logits
        model.set_attn_implementation("eager")
        torch.testing.assert_close(found, model(tokens).logits, rtol=1e-2, atol=1e-3)
