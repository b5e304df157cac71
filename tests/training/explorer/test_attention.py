"""What is shown of a layer is what the layer computes."""

import pytest
import torch
from support.corpora import byte_tokenizer
from support.model_cases import GATED_DELTA
from transformers import LlamaConfig, LlamaForCausalLM

from modeling_nlq import NLQForConditionalGeneration, NLQSeq2SeqConfig, load_attention_parts
from modeling_nlq.training.explorer.attention import measure_attention, tokens_to_ablate
from modeling_nlq.training.explorer.exploring import Subject, explore_tokens, prepare, show_source
from modeling_nlq.training.explorer.measures import ablations, effective_ranks, repeated_tokens
from modeling_nlq.training.observe import observe_calls


RANDOM = repeated_tokens(13, [0], 6)
TOKENIZER = byte_tokenizer(1)  # bytes have even ids


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
def test_weights_are_those_that_the_model_returns(make_model, name):
    model, ids = make_model(dtype=torch.float64, **MODELS[name]), torch.randint(13, (1, 11))
    layers = measure_attention(model, ids, RANDOM, 11)
    with torch.no_grad():
        expected, on_random = (model(tokens, output_attentions=True).attentions for tokens in (ids, RANDOM))
    first = 2 if name == "stick_breaking" else 1  # queries before it see one key at most
    for layer, weights, random in zip(layers, expected, on_random, strict=True):
        torch.testing.assert_close(layer.weights, weights[0])
        assert layer.heads == len(weights[0])
        torch.testing.assert_close(layer.numbers["row_sum"], weights[0].sum(-1)[:, first:].mean(-1))
        share = (random[0].abs() / random[0].abs().sum(-1, keepdim=True)).nan_to_num(nan=0.0)
        previous = torch.stack([share[:, i, i - 1] for i in range(1, 12)]).mean(0)
        induction = torch.stack([share[:, i, i - 5] for i in range(6, 12)]).mean(0)
        torch.testing.assert_close(layer.numbers["previous_token"], previous)
        torch.testing.assert_close(layer.numbers["induction"], induction)
    for layer, cost in zip(layers, ablations(model, ids, [layer.heads for layer in layers]), strict=True):
        torch.testing.assert_close(layer.numbers["ablation"], cost)


@pytest.mark.parametrize("activation", ["tanh", "linear_attention"])
def test_cross_attention(activation):
    half = {**SIZES, "max_position_embeddings": 32}
    decoder = {**half, "per_layer_config": {1: {"cross_attention": False}}}
    decoder["cross_attention"] = {"attention_activation": activation}
    pair = NLQForConditionalGeneration(NLQSeq2SeqConfig(encoder=half, decoder=decoder))
    subject, ids, source = prepare(pair), torch.randint(13, (1, 9)), torch.randint(13, (1, 5))
    pair.double().set_attn_implementation("eager")
    with torch.no_grad():
        for parameter in pair.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        expected = pair(source, decoder_input_ids=ids, output_attentions=activation == "tanh")
        show_source(subject, source[0].tolist())
        found = measure_attention(subject.model, ids, RANDOM, 9)
        pair.model.decoder.layers[0].cross_attn.o_proj.weight[:, :4] = 0.0
        logits = (expected.logits, pair(source, decoder_input_ids=ids).logits)
    before, after = (torch.nn.functional.cross_entropy(each[0, :-1], ids[0, 1:]) for each in logits)
    assert [layer.name for layer in found] == ["0", "0 cross", "1"]
    torch.testing.assert_close(found[1].numbers["ablation"][0], after - before)
    if activation == "tanh":
        torch.testing.assert_close(found[2].weights, expected.decoder_attentions[1][0])
        torch.testing.assert_close(found[1].weights, expected.cross_attentions[0][0])
        torch.testing.assert_close(found[1].numbers["row_sum"], found[1].weights.sum(-1).mean(-1))
        assert found[1].missing.keys() == {"own_value_cosine", "previous_token", "induction"}
    else:
        assert found[1].weights is None and found[1].numbers.keys() == {"effective_rank", "ablation"}


LINEAR = {"attention_activation": "linear_attention", "value_projection": "linear"}


@pytest.mark.parametrize("name", [*(name for name in MODELS if name not in ("v1", "v2")), "linear", "delta"])
def test_cosines_of_every_kind_of_layer(make_model, name):
    """Without parts that change the output, the input of the output projection is the output of the heads."""
    switches = MODELS.get(name, GATED_DELTA if name == "delta" else LINEAR)
    model, ids = make_model(dtype=torch.float64, **switches), torch.randint(13, (1, 9))
    values = {}

    def keep(layer, call, _):
        layer.prepare(call, None) if layer.activation.kind != "linear" else layer.project(call)
        values[layer.layer_idx] = call.values[0].repeat_interleave(layer.num_key_value_groups, dim=0)

    observe_calls(model, keep, ids)
    for index, (layer, y) in enumerate(zip(measure_attention(model, ids, RANDOM), watch(model, ids), strict=True)):
        y = y.view(9, 4, 4).transpose(0, 1)
        expected = torch.nn.functional.cosine_similarity(y, values[index], dim=-1)
        first = 2 if name == "stick_breaking" else 1  # the first query that sees several keys
        torch.testing.assert_close(layer.numbers["own_value_cosine"], expected[:, first:].mean(dim=-1))


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
    layer = measure_attention(model, ids, RANDOM)[0]
    scores = torch.einsum("ihd,jhd->hij", states["q_proj"], states["k_proj"]) * attention.scaling
    causal = torch.ones(9, 9).tril().bool()
    torch.testing.assert_close(
        layer.numbers["largest_score"], scores.masked_fill(~causal, -torch.inf).amax(dim=(1, 2))
    )
    torch.testing.assert_close(layer.numbers["effective_rank"], effective_ranks(states["q_proj"].transpose(0, 1)))


def first_input(model, ids):
    inputs, attention = [], model.model.layers[0].self_attn
    with (
        torch.no_grad(),
        attention.register_forward_pre_hook(lambda _, given, __: inputs.append(given[0]), with_kwargs=True),
    ):
        model(ids)
    return inputs[0]


@torch.no_grad()
def test_numbers_of_parts(make_model):
    switches = {"attention_gate": "elementwise", "forget_gate": "learned", "exclusive_attention": "learned"}
    model, ids = make_model(dtype=torch.float64, **SOFTMAX, **switches), torch.randint(13, (1, 6))
    attention, inputs = model.model.layers[0].self_attn, first_input(model, ids)
    gate = torch.sigmoid(attention.gate_proj(inputs)).view(6, 4, 4).mean(dim=(0, 2))
    forget = torch.nn.functional.logsigmoid(attention.parts["forget_gate"].proj(inputs))[0].mean(dim=0)
    alpha = torch.tanh(attention.parts["exclusive_attention"].alpha)
    numbers = measure_attention(model, ids, RANDOM)[0].numbers
    torch.testing.assert_close(numbers["mean_gate"], gate)
    torch.testing.assert_close(numbers["mean_log_forget_gate"], forget)
    torch.testing.assert_close(numbers["own_value_taken_out"], alpha)


@torch.no_grad()
def test_factors_of_differential_attention(make_model):
    ids = torch.randint(13, (1, 6))
    v2 = make_model(dtype=torch.float64, **SOFTMAX, differential_attention="v2", forget_gate="fixed")
    part = v2.model.layers[0].self_attn.parts["differential_attention"]
    expected = torch.sigmoid(part.proj(first_input(v2, ids)))[0].mean(dim=0)
    layer = measure_attention(v2, ids, RANDOM)[0]
    torch.testing.assert_close(layer.numbers["factor_of_second_map"], expected)
    assert "subtracts two maps" in layer.missing["mean_log_forget_gate"]
    v1 = measure_attention(make_model(**SOFTMAX, differential_attention="v1"), ids, RANDOM)
    assert (
        v1[0].numbers["factor_of_second_map"].shape == (2,)
        and len(set(v1[0].numbers["factor_of_second_map"].tolist())) == 1
    )


def test_a_part_that_measures_wrongly(make_model, tmp_path):
    (tmp_path / "measured.py").write_text(
        "import torch\nfrom modeling_nlq import AttentionPart\nclass Measured(AttentionPart):\n    name = 'measured'\n"
        "    def measure(self, call):\n        return {'wrong': torch.zeros(3)}\n"
    )
    load_attention_parts(tmp_path / "measured.py")
    with pytest.raises(ValueError, match=r"attention part 'measured': 'wrong' has shape=\(3,\), not \(4,\)"):
        measure_attention(make_model(attention_parts=["measured"]), torch.randint(13, (1, 6)), RANDOM)


def test_large_models_are_not_ablated(make_model):
    model = make_model()
    assert tokens_to_ablate(model, 500) == 500
    for parameters, expected in ((4e12 / 8 / 2 / 100, 100), (4e12 / 8 / 2 / 10, 64), (1e12, 0)):
        model.num_parameters = lambda parameters=parameters: parameters
        assert tokens_to_ablate(model, 500) == pytest.approx(expected, abs=1)


SIZES = {"vocab_size": 13, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}


def test_a_model_that_converts_is_shown_by_its_conversion():
    model = LlamaForCausalLM(
        LlamaConfig(**SIZES, intermediate_size=24, num_key_value_heads=2, attn_implementation="eager")
    ).eval()
    ids = torch.randint(13, (1, 8))
    with torch.no_grad():
        expected = model(ids, output_attentions=True).attentions
    subject = prepare(model)
    assert "exact conversion" in subject.description
    for layer, weights in zip(measure_attention(subject.model, ids, RANDOM, 8), expected, strict=True):
        torch.testing.assert_close(layer.weights, weights[0])
        assert not layer.missing


def test_scores_do_not_depend_on_the_context_of_rotary_models(make_model):
    """Nor on which model of a pair has fewer positions."""
    subjects = {}
    for positions in (8, 32):
        model = make_model(position_embedding="rope", max_position_embeddings=positions, **SOFTMAX)
        subjects[str(positions)] = Subject(model, "")
    learned = Subject(make_model(max_position_embeddings=8), "")
    first, second = (
        explore_tokens({name: subject}, TOKENIZER, [1, 2, 3]).models[0].layers[0].numbers["induction"]
        for name, subject in subjects.items()
    )
    torch.testing.assert_close(first, second)
    pair = explore_tokens({"rope": subjects["32"], "learned": learned}, TOKENIZER, [1, 2, 3])
    assert "measured on 4 random tokens, repeated once" in pair.page


def test_a_model_that_diverged(make_model):
    model = make_model()
    torch.nn.init.constant_(model.model.norm.weight, torch.nan)
    with pytest.raises(ValueError, match="model 'lost': its losses are infinite or not a number"):
        explore_tokens({"lost": Subject(model, "")}, TOKENIZER, [1, 2, 3])
