"""`nlq_triton` with tensors of any strides, between memory that must not be read or written."""

import math

import pytest
import torch
from support.attention_cases import (
    LAYOUTS,
    SCALING,
    Layout,
    causal,
    check,
    dense,
    expected_of,
    layer_for,
    random_booleans,
    results,
)
from support.elementwise_backends import TRITON
from support.grids import slow_except
from support.triton_cases import DEVICE, MARKS, TOLERANCE
from torch import nn

from modeling_nlq.kernels.triton import attention as triton_attention
from modeling_nlq.kernels.triton.attention import triton_attention_forward


pytestmark = MARKS


@pytest.mark.usefixtures("small_tiles")
class TestStrides:
    """Tensors of any strides, between memory that is NaN."""

    LAYOUT = Layout(causal, query_length=9, key_length=9, heads=2, key_value_heads=1)

    WAYS = {
        "contiguous": lambda states: states.contiguous(),
        "length_first": lambda states: states.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
        "last_dimension": lambda states: states.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        "every_other": lambda states: nn.functional.pad(states[..., None], (0, 1), value=math.nan).flatten(-2)[..., ::2],
        # Sliced out of a larger one, whose other numbers are NaN
        "sliced": lambda states: nn.functional.pad(states, (3, 2, 4, 5, 1, 1, 1, 0), value=math.nan)[1:, 1:-1, 4:-5, 3:-2],
        "step": lambda states: torch.stack([states, torch.full_like(states, math.nan)], dim=3).flatten(2, 3)[:, :, ::2],
    }

    @pytest.mark.parametrize("way", slow_except(tuple(WAYS), ("last_dimension", "sliced")))
    def test_laid_out(self, way):
        states = self.LAYOUT.states()
        moved = [self.WAYS[way](tensor.detach()) for tensor in states]
        assert all(torch.equal(one, other) for one, other in zip(moved, states))
        actual = TRITON.run(self.LAYOUT, layer_for(self.LAYOUT, "softplus"), moved)
        check(actual, expected_of(self.LAYOUT, "softplus", "sum", states), TOLERANCE)

    def test_expanded(self):
        """One query for both heads, one key and value for both batches and all places: strides of 0."""
        layout = self.LAYOUT
        query, key, value = (tensor.detach() for tensor in layout.states())
        key, value = (tensor[:1, :, :1].expand(2, -1, 9, -1) for tensor in (key, value))
        query = query[:, :1].expand(-1, 2, -1, -1)
        states = [tensor.requires_grad_() for tensor in (query, key, value)]
        check(
            TRITON.run(layout, layer_for(layout, "softplus"), states), expected_of(layout, "softplus", "sum", states), TOLERANCE
        )

    @pytest.mark.slow
    @pytest.mark.parametrize("which", [0, 1, 2], ids=["query", "key", "value"])
    def test_one_laid_out_in_another_way(self, which):
        states = self.LAYOUT.states()
        moved = [tensor.contiguous() for tensor in states]
        moved[which] = self.WAYS["sliced"](states[which].detach())
        actual = TRITON.run(self.LAYOUT, layer_for(self.LAYOUT, "softplus"), moved)
        check(actual, expected_of(self.LAYOUT, "softplus", "sum", states), TOLERANCE)

    def test_inputs_stay_as_they_are(self):
        layout = LAYOUTS["mask_of_one_row"]
        states = [tensor.detach().to(DEVICE).requires_grad_() for tensor in layout.states()]
        mask = TRITON.mask(layout.mask())
        before = [tensor.detach().clone() for tensor in (*states, mask)]
        output, _ = triton_attention_forward(layer_for(layout, "sigmoid"), *states, mask, scaling=SCALING)
        results(output, states)
        assert all(torch.equal(tensor, copy) for tensor, copy in zip((*states, mask), before))

    @pytest.mark.parametrize("way", slow_except(("contiguous", "transposed", "sliced"), ("sliced",)))
    def test_masks_laid_out(self, way):
        visible = random_booleans(2, 2, 9, 9)
        mask = {
            "contiguous": visible,
            "transposed": visible.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
            "sliced": nn.functional.pad(visible, (2, 3, 1, 1, 1, 0), value=True)[:, 1:, 1:-1, 2:-3],
        }[way]
        layout = dense(visible, mask, key_value_heads=1)
        states = layout.states()
        actual = TRITON.run(layout, layer_for(layout, "softplus"), states)
        check(actual, expected_of(layout, "softplus", "sum", states), TOLERANCE)

    @pytest.mark.parametrize("split", [False, True], ids=["", "split"])
    @pytest.mark.parametrize("name", ["odd_length", "padded_chunk_in_static_cache"])
    def test_nothing_is_stored_elsewhere(self, monkeypatch, name, split):
        """Results lie inside larger buffers, whose other numbers stay."""
        if split:
            monkeypatch.setattr(triton_attention, "MIN_SPLIT_KEYS", 1)
        buffers = []

        def guarded(tensor):
            buffer = torch.full((tensor.numel() + 512,), 7.0, dtype=tensor.dtype, device=tensor.device)
            buffers.append(buffer)
            return buffer[256:-256].view(tensor.shape)

        new_results, new_gradient = triton_attention._new_results, triton_attention._new_gradient
        monkeypatch.setattr(triton_attention, "_new_results", lambda *inputs: tuple(map(guarded, new_results(*inputs))))
        monkeypatch.setattr(
            triton_attention, "_new_gradient", lambda states: guarded(new_gradient(states).transpose(1, 2)).transpose(1, 2)
        )
        layout = LAYOUTS[name]
        states = layout.states(torch.bfloat16)
        TRITON.run(layout, layer_for(layout, "softplus"), states)
        assert len(buffers) == 6
        for buffer in buffers:
            assert (buffer[:256] == 7).all() and (buffer[-256:] == 7).all()
