"""`flex_attention` against the formulas: PyTorch's own function here, and a stand-in for its kernels on a GPU."""

import pytest
import torch
from support.attention_cases import (
    ALL_COMBINATIONS,
    LAYOUTS,
    NON_NEGATIVE,
    PHI,
    SCALING,
    almost_nothing,
    check,
    combinations,
    expected_of,
    layer,
    layer_for,
    mask_of,
    reference,
    results,
    run,
)
from support.flex_stand_in import dense_flex_attention
from support.grids import parametrize_grid
from torch.nn.attention.flex_attention import create_block_mask

from modeling_nlq import flex_nlq
from modeling_nlq.activations_nlq import get_attention_activation
from modeling_nlq.attention_nlq import eager_attention_forward
from modeling_nlq.flex_nlq import FlexMask, flex_attention_with_log_forward, log_function


def block_mask(layout):
    def mask_mod(batch, head, query, key):
        return layout.visible[batch, head, query, key]

    sizes = (layout.batch, layout.heads, layout.query_length, layout.key_length)
    return create_block_mask(mask_mod, *sizes, device="cpu")


FLEX_LAYOUTS = {name: layout for name, layout in LAYOUTS.items() if "mask" not in name or name == "static_cache_without_mask"}
NON_NEGATIVE_COMBINATIONS = [pair for pair in ALL_COMBINATIONS if pair[0] in NON_NEGATIVE]


def run_flex(layout, module, states, scaling=SCALING):
    count = layout.visible[:, 0].sum(dim=-1)
    return flex_attention_with_log_forward(module, *states, FlexMask(block_mask(layout), count), scaling=scaling)[0]


class TestFlexAttentionHere:
    """PyTorch's own function, as far as the CPU has it: without gradients."""

    @pytest.fixture(autouse=True)
    def uncompiled(self):
        with torch.compiler.set_stance("force_eager"), torch.no_grad():
            yield

    @parametrize_grid({"activation": (*NON_NEGATIVE, "softmax"), "layout": FLEX_LAYOUTS}, strength=1)
    def test_sum(self, activation, layout):
        states = [tensor.detach() for tensor in layout.states()]
        expected = reference(*states, layout.visible, activation, "sum", SCALING)
        actual = run_flex(layout, layer_for(layout, activation, "sum"), states)
        check([actual], [expected], 1e-5)
        assert (actual[~layout.visible.any(dim=-1).transpose(1, 2)] == 0).all()

    @parametrize_grid(
        {
            "activation, normalization": [pair for pair in NON_NEGATIVE_COMBINATIONS if pair[1] != "sum"],
            "name": ("left_padding", "nothing_visible", "grouped_queries", "chunk_after_cache"),
        },
        strength=1,
    )
    def test_other_normalisers(self, monkeypatch, activation, normalization, name):
        """The uncompiled function does return a log-sum-exp: the natural logarithm that the formula takes it for."""
        monkeypatch.setattr(flex_nlq, "_check_flex_attention_on_cpu", lambda *inputs: None)
        layout = FLEX_LAYOUTS[name]
        states = [tensor.detach() for tensor in layout.states()]
        expected = reference(*states, layout.visible, activation, normalization, SCALING)
        check([run_flex(layout, layer_for(layout, activation, normalization), states)], [expected], 1e-5)

    @pytest.mark.parametrize("activation", ["relu", "relu_squared"])
    def test_no_weight_is_positive(self, activation):
        layout = LAYOUTS["causal"]
        query, key, value = (tensor.detach() for tensor in layout.states())
        output = run_flex(layout, layer(activation, "sum"), [query.abs(), -key.abs(), value])
        assert (output == 0).all()

    @pytest.mark.parametrize("activation", NON_NEGATIVE)
    def test_model(self, make_model, activation):
        switches = {"attention_activation": activation, "attention_normalization": "sum", "num_key_value_heads": 2}
        switches["query_projection"] = "linear"
        input_ids = torch.randint(13, (2, 9))
        attention_mask = mask_of("111111111", "000111111")
        logits = [
            make_model(implementation=name, **switches)(input_ids, attention_mask=attention_mask).logits
            for name in ("flex_attention", "eager")
        ]
        torch.testing.assert_close(*[tensor[attention_mask.bool()] for tensor in logits], rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize(
        "module, refused",
        [
            (layer("relu", "length"), "attention_activation='relu' normalised by 'length'"),
            (layer("sigmoid", "none"), "attention_activation='sigmoid' normalised by 'none'"),
            (layer("softmax", sink=torch.zeros(2), attention_sink="zero"), "attention_sink='zero'"),
            (layer("relu", "sum"), "gradients"),
        ],
        ids=["length", "none", "sink", "gradients"],
    )
    def test_refusals(self, module, refused):
        layout = LAYOUTS["causal"]
        with pytest.raises(ValueError) as error, torch.enable_grad():
            run_flex(layout, module, layout.states())
        assert str(error.value) == (
            f"attn_implementation='flex_attention' cannot compute {refused} on the CPU (layer 0); use 'nlq' or 'eager'"
        )


class TestFlexAttentionElsewhere:
    """Every normaliser, and gradients, with a dense stand-in for PyTorch's kernels of a GPU."""

    @pytest.fixture(autouse=True)
    def stand_in(self, monkeypatch):
        monkeypatch.setattr(flex_nlq, "compile_friendly_flex_attention", dense_flex_attention)
        monkeypatch.setattr(flex_nlq, "_check_flex_attention_on_cpu", lambda *inputs: None)

    @parametrize_grid({"activation": NON_NEGATIVE, "normalization": ("sum", "length", "none"), "layout": FLEX_LAYOUTS})
    def test_float32(self, activation, normalization, layout):
        states = layout.states()
        actual = results(run_flex(layout, layer_for(layout, activation, normalization), states), states)
        check(actual, expected_of(layout, activation, normalization, states), 1e-5)

    @combinations(NON_NEGATIVE_COMBINATIONS)
    def test_scores_of_zero(self, activation, normalization):
        layout = LAYOUTS["causal"]
        query, key, value = layout.states()
        states = [torch.zeros_like(query, requires_grad=True), key, value]
        actual = results(run_flex(layout, layer(activation, normalization), states), states)
        eager = run(eager_attention_forward, layout, layer(activation, normalization), states)
        check(actual, eager, 1e-5)

    @pytest.mark.parametrize("normalization", ["sum", "length", "none"])
    @pytest.mark.parametrize("activation", ["relu", "relu_squared"])
    def test_no_weight_is_positive(self, activation, normalization):
        layout = LAYOUTS["causal"]
        query, key, value = (tensor.detach() for tensor in layout.states())
        states = [query.abs().requires_grad_(), (-key.abs()).requires_grad_(), value.requires_grad_()]
        for tensor in results(run_flex(layout, layer(activation, normalization), states), states):
            assert (tensor == 0).all()

    @pytest.mark.parametrize("score", [1e4, -1e4], ids=["1e4", "-1e4"])
    @combinations(NON_NEGATIVE_COMBINATIONS)
    def test_scores_of_ten_thousand(self, activation, normalization, score):
        layout = LAYOUTS["causal"]
        query, key, value = (tensor.detach() for tensor in layout.states())
        states = [torch.full_like(query, score), torch.full_like(key, 0.25), value]
        states = [tensor.requires_grad_() for tensor in states]
        actual = results(run_flex(layout, layer(activation, normalization), states, scaling=1.0), states)
        eager, _ = eager_attention_forward(layer(activation, normalization), *states, None, scaling=1.0)
        check(actual, results(eager, states), 1e-5)

    @almost_nothing
    @pytest.mark.parametrize("normalization", ["sum", "length", "none"])
    def test_almost_no_weight(self, activation, normalization, score):
        """A sum too small to divide by counts as 0, as in eager."""
        layout = LAYOUTS["causal"]
        _, key, value = (tensor.detach() for tensor in layout.states())
        states = [torch.full_like(key, float(score)), torch.full_like(key, 0.25), value]
        states = [tensor.requires_grad_() for tensor in states]
        output = run_flex(layout, layer(activation, normalization), states, scaling=1.0)
        assert output.abs().max() < 1e-20
        assert all(tensor.isfinite().all() for tensor in results(output, states))

    @pytest.mark.parametrize("activation, normalization", [("relu", "length"), ("sigmoid", "none")])
    def test_block_mask_without_count(self, activation, normalization):
        layout = LAYOUTS["causal"]
        module = layer(activation, normalization)
        with pytest.raises(ValueError, match=f"cannot count the keys .*='{activation}' normalised by '{normalization}'"):
            flex_attention_with_log_forward(module, *layout.states(), FlexMask(block_mask(layout)), scaling=SCALING)

    def test_no_mask(self):
        layout = LAYOUTS["causal"]
        with pytest.raises(ValueError, match=r"'flex_attention' \(layer 0\) needs a block mask"):
            flex_attention_with_log_forward(layer("relu", "sum"), *layout.states(), None, scaling=SCALING)

    def test_no_count_is_needed(self):
        layout = LAYOUTS["causal"]
        states = layout.states()
        output, _ = flex_attention_with_log_forward(layer("relu", "sum"), *states, block_mask(layout), scaling=SCALING)
        check(results(output, states), expected_of(layout, "relu", "sum", states), 1e-5)
        output, _ = flex_attention_with_log_forward(
            layer("relu", "none"), *states, FlexMask(block_mask(layout)), scaling=SCALING
        )
        check(results(output, states), expected_of(layout, "relu", "none", states), 1e-5)

    @pytest.mark.parametrize("activation", NON_NEGATIVE)
    def test_log_function(self, activation):
        scores = torch.tensor([-50.0, -20.0, -1.0, 0.0, 0.5, 1e4], dtype=torch.float64, requires_grad=True)
        actual = log_function(get_attention_activation(activation), scores)
        phi = PHI[activation](scores)
        positive = phi > 0
        assert (actual[~positive] == -torch.inf).all()
        torch.testing.assert_close(actual[positive], phi[positive].log())
        gradient = torch.autograd.grad(actual[positive].sum(), scores, retain_graph=True)[0]
        torch.testing.assert_close(gradient, torch.autograd.grad(phi[positive].log().sum(), scores, retain_graph=True)[0])
        assert (torch.autograd.grad(actual.sum(), scores)[0][~positive] == 0).all()
