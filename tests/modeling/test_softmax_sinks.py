"""Softmax on SDPA, with and without sinks."""

import math

import pytest
import torch
from support.attention_cases import (
    LAYOUTS,
    SCALING,
    Layout,
    causal,
    check,
    check_rounding,
    error,
    layer_for,
    reference,
    results,
)
from support.grids import parametrize_grid

from modeling_nlq.attention_nlq import eager_attention_forward
from modeling_nlq.backends_nlq import sdpa_with_sink_forward


class TestSinks:
    """Softmax on SDPA, with and without sinks."""

    KINDS = {"none": None, "zero": [0.0] * 4, "learned": [-1.5, 0.4, 2.5, 0.0], "large": [60.0, -60.0, 0.0, 1.0]}
    kinds = pytest.mark.parametrize("kind", KINDS)

    def module(self, kind, layout, dtype=torch.float32, **options):
        sink = None if kind == "none" else torch.tensor(self.KINDS[kind][: layout.heads], dtype=dtype)
        attention_sink = {"none": None, "zero": "zero"}.get(kind, "learned")
        if attention_sink == "learned":
            sink.requires_grad_()
        return layer_for(layout, "softmax", sink=sink, attention_sink=attention_sink, **options)

    def run(self, function, module, layout, states, scaling=SCALING, **options):
        mask = None if layout.mask() is None else layout.visible
        output, _ = function(module, *states, mask, scaling=scaling, **options)
        return results(output, self.inputs(module, states))

    @staticmethod
    def inputs(module, states):
        return [*states, module.sink] if module.attention_sink == "learned" else states

    @parametrize_grid({"kind": tuple(KINDS), "layout": LAYOUTS}, strength=1)
    def test_float32(self, kind, layout):
        module, states = self.module(kind, layout), layout.states()
        output = reference(*states, layout.visible, "softmax", "sum", SCALING, sink=module.sink)
        expected = results(output, self.inputs(module, states))
        sdpa = self.run(sdpa_with_sink_forward, module, layout, states)
        check(sdpa, expected, 1e-5)
        check(self.run(eager_attention_forward, module, layout, states), expected, 1e-5)
        nothing = ~layout.visible.any(dim=-1).transpose(1, 2)
        assert (sdpa[0][nothing] == 0).all()

    @parametrize_grid(
        {"kind": tuple(KINDS), "name": ("causal", "left_padding", "grouped_queries", "one_query_long_cache")}, strength=1
    )
    def test_bfloat16(self, kind, name):
        layout = LAYOUTS[name]
        module, states = self.module(kind, layout), layout.states(torch.bfloat16)
        output = reference(*states, layout.visible, "softmax", "sum", SCALING, sink=module.sink)
        expected = results(output, self.inputs(module, states))
        sdpa = self.run(sdpa_with_sink_forward, module, layout, states)
        eager = self.run(eager_attention_forward, module, layout, states)
        check_rounding(sdpa[:4], eager, expected)
        if kind in ("learned", "large"):  # a parameter in float32, read in the precision of the scores
            assert sdpa[4].dtype == torch.float32
            assert error(sdpa[4], expected[4]) <= 2 * 2**-7

    @parametrize_grid(
        {"scaling": (0.0, -0.5), "kind": tuple(KINDS), "name": ("causal", "left_padding", "one_query")},
    )
    def test_scaling_without_sign(self, scaling, kind, name):
        """Equal scores, which leave only the sink to choose, and turned ones: PyTorch's causal kernel returns NaN for both."""
        layout = LAYOUTS[name]
        module, states = self.module(kind, layout), layout.states()
        output = reference(*states, layout.visible, "softmax", "sum", scaling, sink=module.sink)
        expected = results(output, self.inputs(module, states))
        check(self.run(sdpa_with_sink_forward, module, layout, states, scaling=scaling), expected, 1e-5)

    @kinds
    def test_finite_differences(self, kind):
        layout = Layout(causal, query_length=3, key_length=4, batch=1)
        module, states = self.module(kind, layout, torch.float64), layout.states(torch.float64, head_dim=2)

        def function(*inputs):
            if module.attention_sink == "learned":
                module.sink = inputs[3]
            return sdpa_with_sink_forward(module, *inputs[:3], None, scaling=SCALING)[0]

        assert torch.autograd.gradcheck(function, self.inputs(module, states))

    @kinds
    def test_dropout(self, kind):
        layout = LAYOUTS["grouped_queries"]
        module, states = self.module(kind, layout, training=True), layout.states()

        def run(seed, dropout=0.25):
            torch.manual_seed(seed)
            return sdpa_with_sink_forward(module, *states, None, scaling=SCALING, dropout=dropout)[0].detach()

        assert torch.equal(run(1), run(1))
        assert not torch.allclose(run(1), run(2))
        samples = torch.stack([run(seed) for seed in range(400)])
        deviation = samples.std(dim=0) / math.sqrt(len(samples))
        assert ((samples.mean(dim=0) - run(0, dropout=0.0)).abs() <= 5 * deviation + 1e-6).all()

    def test_inputs_stay_as_they_are(self):
        layout = LAYOUTS["grouped_queries"]
        states = layout.states()
        before = [tensor.detach().clone() for tensor in states]
        sdpa_with_sink_forward(self.module("learned", layout), *states, None, scaling=SCALING)
        assert all(torch.equal(tensor, copy) for tensor, copy in zip(states, before))
