"""What is shown of a layer is what the layer computes."""

import pytest
import torch
from transformers import GemmaConfig, GemmaForCausalLM, LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM

from modeling_nlq.training.conversion.renaming import to_nlq
from modeling_nlq.training.explore.attention import HEADS, ROWS, look
from modeling_nlq.training.explore.exploring import prepare


class Letters:
    """All of a tokenizer that `look` reads."""

    all_special_ids = (0,)

    def __len__(self):
        return 13


SOFTMAX = {"query_projection": "linear"}
MODELS = {
    "softmax": SOFTMAX,
    "sink": {**SOFTMAX, "attention_sink": "learned"},
    "grouped window of sigmoid": {"attention_activation": "sigmoid", "num_key_value_heads": 2, "sliding_window": 3},
    "tanh": {"attention_activation": "tanh", "position_embedding": "rope"},
    "stick_breaking": {"attention_activation": "stick_breaking"},
    "forget_gate": {**SOFTMAX, "forget_gate": "learned"},
    "selective": {**SOFTMAX, "selective_attention": True},
    "parallax": {**SOFTMAX, "parallax": True, "num_key_value_heads": 2},
    "value_residual": {**SOFTMAX, "value_residual": "learned", "num_key_value_heads": 2},
    "v1": {**SOFTMAX, "differential_attention": "v1"},
    "v2": {**SOFTMAX, "differential_attention": "v2", "num_key_value_heads": 2},
}


def watch(model, ids):
    """The inputs of each output projection, `(length, width)`."""
    found = []
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0][0]))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("name", MODELS)
def test_weights_and_own_values(make_model, name):
    model, ids = make_model(dtype=torch.float64, **MODELS[name]), torch.randint(13, (1, 11))
    layers = look(model, Letters(), ids)
    with torch.no_grad():
        expected = model(ids, output_attentions=True).attentions
    for layer, weights, outputs in zip(layers, expected, watch(model, ids), strict=True):
        torch.testing.assert_close(layer.weights, weights[0])
        assert layer.heads == len(weights[0])
        sums = layer.rows["row_sum"]
        assert layer.numbers["row_sum"].tolist() == pytest.approx(
            sums[:, 2 if name == "stick_breaking" else 1 :].mean(1).tolist()
        )
        if name == "v1":
            assert "two groups" in layer.missing["own_value_cosine"]
            continue
        # Of a first query that sees its own key alone, the output is a multiple of its value
        if name in ("softmax", "tanh", "forget_gate", "v2"):
            assert layer.rows["own_value_cosine"][:, 0].abs().tolist() == pytest.approx([1.0] * layer.heads)
        assert outputs.shape == (11, 16)


@pytest.mark.parametrize("switches", [SOFTMAX, {"attention_activation": "linear_attention"}])
def test_cosines_are_those_of_the_outputs_of_heads(make_model, switches):
    model, ids = make_model(dtype=torch.float64, value_projection="linear", **switches), torch.randint(13, (1, 9))
    values = []
    hooks = [
        layer.self_attn.v_proj.register_forward_hook(lambda _m, _i, out: values.append(out[0])) for layer in model.model.layers
    ]
    outputs = watch(model, ids)
    for hook in hooks:
        hook.remove()
    for layer, y, v in zip(look(model, Letters(), ids), outputs, values, strict=True):
        expected = torch.nn.functional.cosine_similarity(y.view(9, 4, 4), v.view(9, 4, 4), dim=-1).T
        torch.testing.assert_close(layer.rows["own_value_cosine"], expected)
        torch.testing.assert_close(layer.numbers["own_value_cosine"], expected[:, 1:].mean(dim=-1))


def test_scores_and_queries(make_model):
    model, ids = make_model(dtype=torch.float64, **SOFTMAX), torch.randint(13, (1, 9))
    states = {}
    attention = model.model.layers[0].self_attn
    hooks = [
        getattr(attention, name).register_forward_hook(
            lambda _m, _i, out, name=name: states.update({name: out[0].view(9, 4, 4)})
        )
        for name in ("q_proj", "k_proj")
    ]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    layer = look(model, Letters(), ids)[0]
    scores = torch.einsum("ihd,jhd->hij", states["q_proj"], states["k_proj"]) * attention.scaling
    causal = torch.ones(9, 9).tril().bool()
    torch.testing.assert_close(layer.numbers["largest_score"], scores.masked_fill(~causal, -torch.inf).amax(dim=(1, 2)))
    assert all(1.0 <= rank <= 4.0 for rank in layer.numbers["effective_rank"].tolist())


def test_what_a_layer_lacks_is_said(make_model):
    model = make_model(per_layer_config={1: {"attention_activation": "linear_attention"}}, attention_gate="headwise")
    softmax, linear = look(model, Letters(), torch.randint(13, (1, 6)), ablated_tokens=6)
    assert not softmax.missing
    assert softmax.numbers.keys() == {*ROWS, *HEADS, "mean gate"}
    assert linear.weights is None
    assert linear.numbers.keys() == {"own_value_cosine", "effective_rank", "ablation", "mean gate"}
    assert linear.numbers.keys() | linear.missing.keys() == {*ROWS, *HEADS, "mean gate", "weights"}


@pytest.mark.parametrize(
    "switches, name, low, high",
    [
        ({"attention_gate": "value"}, "mean gate", 0.0, 1.0),
        ({**SOFTMAX, "forget_gate": "fixed"}, "mean log forget gate", -10.0, 0.0),
        ({**SOFTMAX, "exclusive_attention": "learned"}, "share of the own value taken out", -1.0, 1.0),
        ({**SOFTMAX, "differential_attention": "v2"}, "factor of the second map", 0.0, 1.0),
        ({**SOFTMAX, "differential_attention": "v1"}, "factor of the second map", -1e3, 1e3),
    ],
)
def test_numbers_of_parts(make_model, switches, name, low, high):
    for layer in look(make_model(**switches), Letters(), torch.randint(13, (1, 6))):
        assert layer.numbers[name].shape == (layer.heads,)
        assert all(low <= value <= high for value in layer.numbers[name].tolist())


SIZES = {"vocab_size": 13, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}


def test_a_model_that_converts_is_shown_by_its_conversion():
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, attn_implementation="eager")).eval()
    ids = torch.randint(13, (1, 8))
    with torch.no_grad():
        expected = model(ids, output_attentions=True).attentions
    subject = prepare(model)
    assert "exact conversion" in subject.description
    for layer, weights in zip(look(subject.model, Letters(), ids, 8), expected, strict=True):
        torch.testing.assert_close(layer.weights, weights[0])
        assert not layer.missing


def test_any_other_model_shows_its_weights():
    model = GemmaForCausalLM(GemmaConfig(**SIZES, num_key_value_heads=2, head_dim=4)).eval()
    subject = prepare(model)
    assert subject.model is model
    with pytest.raises(ValueError):
        to_nlq(model)
    ids = torch.randint(13, (1, 8))
    layers = look(model, Letters(), ids)
    with torch.no_grad():
        expected = model(ids, output_attentions=True).attentions
    for layer, weights in zip(layers, expected, strict=True):
        torch.testing.assert_close(layer.weights, weights[0])
        assert layer.missing.keys() == {"own_value_cosine", "effective_rank", "largest_score", "ablation"}


def test_a_model_without_attention():
    subject = prepare(MambaForCausalLM(MambaConfig(vocab_size=13, hidden_size=8, num_hidden_layers=1)).eval())
    assert look(subject.model, Letters(), torch.randint(13, (1, 8))) == []
