"""`flex_attention` against the formulas, by a stand-in for PyTorch's kernels on a GPU."""

import pytest
import torch
from support.attention_cases import (
    ALL_COMBINATIONS,
    LAYOUTS,
    NON_NEGATIVE,
    SCALING,
    check,
    combinations,
    expected_of,
    layer,
    layer_for,
    results,
)
from support.flex_stand_in import dense_flex_attention
from support.grids import parametrize_grid
from torch.nn.attention.flex_attention import create_block_mask

from modeling_nlq import attention_nlq
from modeling_nlq.backends_nlq import ATTENTION_BACKENDS
from modeling_nlq.masking_nlq import FlexMask


FLEX_LAYOUTS = {
    name: layout for name, layout in LAYOUTS.items() if "mask" not in name or name == "static_cache_without_mask"
}
COMBINATIONS = [pair for pair in ALL_COMBINATIONS if pair[0] in NON_NEGATIVE]


def block_mask(layout):
    def mask_mod(batch, head, query, key):
        return layout.visible[batch, head, query, key]

    return create_block_mask(mask_mod, *layout.visible.shape, device="cpu")


def attend(module, states, mask, scaling=SCALING):
    return ATTENTION_BACKENDS["flex_attention"].function(module, *states, mask, scaling=scaling)[0]


def run_flex(layout, module, states, scaling=SCALING):
    return attend(module, states, FlexMask(block_mask(layout), layout.visible[:, 0].sum(dim=-1)), scaling)


def test_what_the_cpu_lacks_is_refused():
    message = r"a sink, or another normaliser than 'sum', on the CPU \(layer 0\); use 'nlq'"
    for module in (layer("relu", "length"), layer("softmax", sink=torch.zeros(2), attention_sink="zero")):
        with pytest.raises(ValueError, match=message):
            run_flex(LAYOUTS["causal"], module, LAYOUTS["causal"].states())


class TestElsewhere:
    """Every normaliser, and gradients, with a dense stand-in for PyTorch's kernels of a GPU."""

    @pytest.fixture(autouse=True)
    def stand_in(self, monkeypatch):
        monkeypatch.setattr(attention_nlq, "compile_friendly_flex_attention", dense_flex_attention)
        monkeypatch.setattr(attention_nlq, "_check_flex_attention_on_cpu", lambda *inputs: None)

    @parametrize_grid({"activation, normalization": COMBINATIONS, "layout": FLEX_LAYOUTS}, strength=1)
    def test_gradients_are_those_of_the_formulas(self, activation, normalization, layout):
        states = layout.states()
        actual = results(run_flex(layout, layer_for(layout, activation, normalization), states), states)
        check(actual, expected_of(layout, activation, normalization, states), 1e-5)

    def test_visible_keys_are_counted_where_needed(self):
        layout = LAYOUTS["causal"]
        states, mask = layout.states(), block_mask(layout)
        for pair, given in ((("relu", "sum"), mask), (("relu", "none"), FlexMask(mask))):
            check(results(attend(layer(*pair), states, given), states), expected_of(layout, *pair, states), 1e-5)
        for name, normalization in (("relu", "length"), ("sigmoid", "none")):
            with pytest.raises(ValueError, match=f"cannot count the keys .*='{name}' normalised by '{normalization}'"):
                attend(layer(name, normalization), states, FlexMask(mask))
        with pytest.raises(ValueError, match=r"'flex_attention' \(layer 0\) needs a block mask"):
            attend(layer("relu", "sum"), states, None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="flex_attention has no backward on the CPU: needs CUDA")
@combinations([*COMBINATIONS, ("softmax", "sum")])
def test_gradients_on_a_gpu(make_model, activation, normalization):
    """Of a whole model. Heads of 16: the kernels take no smaller ones."""
    switches = {"attention_activation": activation, "attention_normalization": normalization, "hidden_size": 64}
    tokens, mask, found = torch.randint(13, (3, 7)).cuda(), torch.ones(3, 7).long().cuda(), []
    mask[0, :3] = 0
    for name in ("flex_attention", "eager"):
        model = make_model(implementation=name, num_key_value_heads=2, query_projection="linear", **switches).cuda()
        logits = model(tokens, attention_mask=mask, use_cache=False).logits[mask.bool()]
        found.append([logits, *torch.autograd.grad(logits.square().sum(), list(model.parameters()))])
    torch.testing.assert_close(*found, rtol=2e-3, atol=2e-3)
