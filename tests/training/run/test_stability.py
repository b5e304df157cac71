"""The recorder of attention: its numbers against the formulas, and training that does not notice it."""

import itertools
import json
import math

import pytest
import torch
from support.runs import interrupt, logged_losses

from modeling_nlq import NLQForCausalLM
from modeling_nlq.training import train
from modeling_nlq.training.run import stability
from modeling_nlq.training.run.blocks import BlockCollator
from modeling_nlq.training.run.data import prepare_data
from modeling_nlq.training.run.recipe import load_recipe
from modeling_nlq.training.run.stability import attention_statistics, loss_spikes, read_stability


TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1, 8, 2, 8, 1, 8, 2]])
# Documents of 4 and 5 tokens; of 1, 6 and 2
PACKED = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 0, 1, 2, 3, 4, 5, 0, 1]])
MODERN = {"qk_norm": "rms", "num_key_value_heads": 2}
CASES = {
    "softmax_modern": {**MODERN, "attention_sink": "learned"},
    "relu": {"attention_activation": "relu"},
    "tanh_l2": {"attention_activation": "tanh", "qk_norm": "l2", "position_embedding": "none"},
    "by_layer": {
        "attention_activation": "squared",
        "per_layer_config": {0: {"attention_activation": "softmax", "attention_normalization": None}},
    },
}
OTHERS = {
    "parts": {**MODERN, "forget_gate": "learned", "attention_length_scaling": "log", "value_residual": "learned"},
    "selective": {**MODERN, "selective_attention": True, "attention_activation": "sigmoid"},
    "stick_breaking": {**MODERN, "attention_activation": "stick_breaking", "sliding_window": 4},
    "encoder": {"is_causal": False},
    "window of an encoder": {"is_causal": False, "sliding_window": 3},
}
all_cases = pytest.mark.parametrize("switches", [*CASES.values(), *OTHERS.values()], ids=[*CASES, *OTHERS])


def capture_scores(model, position_ids):
    scores, heads_of, hooks = [], {}, []

    def combine(module, inputs, output):
        query, key = (heads_of[letter].reshape(*TOKENS.shape, -1, module.head_dim).transpose(1, 2) for letter in "qk")
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        scores.append(module.scaling * torch.einsum("bhid,bhjd->bhij", query, key))

    for attention in (layer.self_attn for layer in model.model.layers):
        for letter in "qk":
            last = getattr(attention, f"{letter}_norm", None) or getattr(attention, f"{letter}_proj")
            keep = lambda _, __, output, letter=letter: heads_of.update({letter: output})  # noqa: E731
            hooks.append(last.register_forward_hook(keep))
        hooks.append(attention.register_forward_hook(combine))
    weights = model(TOKENS, position_ids=position_ids, use_cache=False, output_attentions=True).attentions
    for hook in hooks:
        hook.remove()
    return scores, weights


def expected_statistics(scores, weights, position_ids):
    """The definitions. Without scores, a query sees the keys of which it has a weight."""
    is_seen, places = weights != 0, torch.arange(weights.shape[-1])
    if scores is not None:
        first = places - (places if position_ids is None else position_ids)[..., None, :]
        is_seen = ((places >= first[..., None]) & (places <= places[:, None])).expand(weights.shape)
        assert not weights[~is_seen].any()
    sees_several = is_seen.sum(dim=-1) > 1
    rows = weights.abs()[sees_several]
    is_zero = rows.sum(dim=-1) == 0
    shares = (rows / rows.sum(dim=-1, keepdim=True))[~is_zero]
    masses = shares.gather(-1, is_seen[sees_several][~is_zero].float().argmax(dim=-1, keepdim=True))
    found = {"entropy": torch.special.entr(shares).sum(dim=-1).mean(), "largest_weight": rows.max()}
    found |= {"first_token_mass": masses.mean(), "zero_rows": is_zero.double().mean()}
    if scores is not None:
        seen = scores[is_seen]
        found |= {"smallest_score": seen.min(), "largest_score": seen.max()}
    return {name: value.item() for name, value in found.items()}


class TestStatistics:
    @pytest.mark.parametrize("position_ids", [None, PACKED], ids=["one_document", "packed"])
    @all_cases
    def test_equal_the_definitions(self, switches, position_ids, make_model, monkeypatch):
        monkeypatch.setattr(stability, "QUERY_CHUNK", 4)
        model = make_model(torch.float64, query_projection="linear", **switches)
        with torch.no_grad():
            scores, weights = capture_scores(model, position_ids)
        if switches in OTHERS.values():  # whose scores are more than products
            scores = [None] * len(weights)
        statistics = attention_statistics(model, TOKENS, position_ids)
        for actual, *tensors in zip(statistics, scores, weights, strict=True):
            expected = expected_statistics(*tensors, position_ids)
            assert {name: actual[name] for name in expected} == pytest.approx(expected, rel=1e-9)
        if "relu" in switches.values():
            assert all(layer["zero_rows"] > 0 for layer in statistics)

    @pytest.mark.parametrize("implementation", ["nlq", "nlq_tiled", "flex_attention"])
    def test_same_for_every_backend(self, implementation, make_model):
        expected = attention_statistics(make_model(attention_activation="squared"), TOKENS, PACKED)
        model = make_model(implementation=implementation, attention_activation="squared")
        before = model.config._attn_implementation
        assert attention_statistics(model, TOKENS, PACKED) == expected
        assert model.config._attn_implementation == before and before != "eager"

    def test_rows_of_zeros(self, make_model):
        statistics = attention_statistics(make_model(attention_activation="relu", attention_scaling=0.0), TOKENS)[0]
        assert statistics == {"largest_weight": 0.0, "zero_rows": 1.0, "smallest_score": 0.0, "largest_score": 0.0}

    def test_scores_of_a_model_in_half_precision_are_not_rounded(self, make_model):
        model = make_model()
        exact = attention_statistics(model, TOKENS)
        with torch.autocast("cpu", torch.bfloat16):
            statistics = attention_statistics(model, TOKENS)
        values = torch.tensor([layer["largest_score"] for layer in statistics])
        assert values.tolist() == pytest.approx([layer["largest_score"] for layer in exact], abs=0.1)
        assert not torch.equal(values.bfloat16().float(), values)

    def test_documents_of_one_token_have_scores_only(self, make_model):
        statistics = attention_statistics(make_model(), TOKENS, torch.zeros_like(TOKENS))[0]
        assert set(statistics) == {"smallest_score", "largest_score"}

    def test_leaves_the_model_alone(self, make_model, monkeypatch):
        model = make_model(implementation="nlq_tiled", attention_activation="squared", attention_dropout=0.5).train()
        model.model.layers[0].mlp.eval()
        modes, random_state = [module.training for module in model.modules()], torch.get_rng_state()
        attention_statistics(model, TOKENS)
        monkeypatch.setattr(stability, "_row_statistics", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            attention_statistics(model, TOKENS)
        assert all(parameter.grad is None for parameter in model.parameters())
        assert [module.training for module in model.modules()] == modes
        assert torch.equal(torch.get_rng_state(), random_state)
        assert model.config._attn_implementation == "nlq_tiled"
        assert not any(module._forward_pre_hooks for module in model.modules())


def test_records_of_a_run(run, recipe_file, tmp_path):
    folder, recorded = tmp_path / "run", {"record_stability": True, "stability_steps": 3, "packing": "documents"}
    interrupt(recipe_file, output_dir=folder, **recorded)
    train(recipe_file, output_dir=folder, **recorded)
    train(recipe_file, output_dir=tmp_path / "plain", packing="documents", save_strategy="no")
    assert logged_losses(folder) == logged_losses(tmp_path / "plain")
    curves = read_stability(json.loads((folder / "trainer_state.json").read_text())["log_history"])
    _, blocks, _ = prepare_data(load_recipe(recipe_file), folder)
    probe = BlockCollator(0, restart=True)(list(itertools.islice(blocks["validation"].dataset, 2)))
    expected = attention_statistics(NLQForCausalLM.from_pretrained(folder), probe["input_ids"], probe["position_ids"])
    assert list(curves) == ["0", "1"]
    for layer, last in zip(curves.values(), expected, strict=True):
        assert set(layer) == set(last)
        for name, points in layer.items():
            assert [step for step, _ in points] == [1, 3, 6, 8], name
            assert points[-1][1] == pytest.approx(last[name], rel=1e-5), name
    assert curves["0"]["entropy"][0][1] != curves["0"]["entropy"][-1][1]


def noisy_curve(**changes):
    noise = 0.05 * torch.randn(60, generator=torch.Generator().manual_seed(0))
    losses = [4 + 5 * math.exp(-index / 8) + noise[index].item() for index in range(60)]
    for index, value in changes.items():
        losses[int(index.removeprefix("at_"))] = value
    return [(10 * (index + 1), loss) for index, loss in enumerate(losses)]


@pytest.mark.parametrize(
    "losses, spikes",
    [
        (noisy_curve(), []),
        (noisy_curve(at_30=5.5, at_50=4.8), [310, 510]),
        (noisy_curve(at_2=math.nan, at_40=math.inf), [30, 410]),
        ([(index, 4.0 + 2.0 * (index == 9)) for index in range(30)], []),  # too few to compare with
        # Then the median has followed
        ([(index, 4.0 if index < 20 else 6.0) for index in range(40)], [20, 21, 22, 23, 24]),
        ([(index, 4.0 + 0.09 * (index == 20)) for index in range(30)], []),  # less than a tenth
    ],
    ids=["noise", "leaps", "not finite", "early", "plateau", "ripple"],
)
def test_loss_spikes(losses, spikes):
    assert loss_spikes(losses) == spikes


def test_layers_without_scores(make_model):
    layers = {1: {"attention_activation": "softmax", "linear_attention_decay": None}}
    model = make_model(
        attention_activation="linear_attention", linear_attention_decay="fixed", per_layer_config=layers
    )
    linear, softmax = attention_statistics(model, TOKENS)
    assert linear == {} and "entropy" in softmax
