"""The recorder of attention: its numbers against the formulas, and training that does not notice it."""

import itertools
import json
import math

import pytest
import torch
from support.runs import interrupt, logged_losses

from modeling_nlq import NLQConfig, NLQForCausalLM, NLQForMaskedLM
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
    "softmax": {},
    "softmax_modern": {**MODERN, "attention_sink": "learned"},
    "sigmoid": {"attention_activation": "sigmoid"},
    "relu": {"attention_activation": "relu"},
    "squared": {"attention_activation": "squared"},
    "squared_l2": {"attention_activation": "squared", "qk_norm": "l2", "position_embedding": "none"},
    "tanh": {"attention_activation": "tanh"},
    "by_layer": {
        "attention_activation": "squared",
        "per_layer_config": {0: {"attention_activation": "softmax", "attention_normalization": None}},
    },
}
all_cases = pytest.mark.parametrize("switches", CASES.values(), ids=CASES)


def capture_scores(model, position_ids):
    """Scores by layer, `(batch, heads, query, key)`, from linear projections or their norms."""
    scores, heads_of, hooks = [], {}, []

    def combine(module, inputs, output):
        query, key = (heads_of[letter].reshape(*TOKENS.shape, -1, module.head_dim).transpose(1, 2) for letter in "qk")
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        scores.append(module.scaling * torch.einsum("bhid,bhjd->bhij", query, key))

    for attention in (layer.self_attn for layer in model.model.layers):
        for letter in "qk":
            last = getattr(attention, f"{letter}_norm") or getattr(attention, f"{letter}_proj")
            hooks.append(
                last.register_forward_hook(lambda _, __, output, letter=letter: heads_of.update({letter: output}))
            )
        hooks.append(attention.register_forward_hook(combine))
    weights = model(TOKENS, position_ids=position_ids, use_cache=False, output_attentions=True).attentions
    for hook in hooks:
        hook.remove()
    return scores, weights


def expected_statistics(layer, scores, weights, position_ids):
    """The definitions, row by row."""
    entropies, masses, largest, seen, zero_rows = [], [], [], [], []
    batch, heads, length, _ = scores.shape
    for b, h, i in itertools.product(range(batch), range(heads), range(length)):
        first = 0 if position_ids is None else i - position_ids[b, i].item()
        row_scores, row = scores[b, h, i, first : i + 1], weights[b, h, i].abs()
        assert row[:first].sum() == 0 and row[i + 1 :].sum() == 0
        seen += row_scores.tolist()
        if first == i:
            continue
        largest.append(row.max().item())
        zero_rows.append(float(row.sum() == 0))
        if row.sum() > 0:
            shares = [value / row.sum().item() for value in row[first : i + 1].tolist()]
            entropies.append(-sum(share * math.log(share) for share in shares if share > 0))
            masses.append(shares[0])
    expected = {
        "entropy": sum(entropies) / len(entropies),
        "largest_weight": max(largest),
        "first_token_mass": sum(masses) / len(masses),
        "zero_rows": sum(zero_rows) / len(zero_rows),
        "smallest_score": min(seen),
        "largest_score": max(seen),
    }
    return expected


class TestStatistics:
    @pytest.mark.parametrize("position_ids", [None, PACKED], ids=["one_document", "packed"])
    @all_cases
    def test_equal_the_definitions(self, switches, position_ids, make_model, monkeypatch):
        monkeypatch.setattr(stability, "QUERY_CHUNK", 4)
        model = make_model(torch.float64, query_projection="linear", **switches)
        with torch.no_grad():
            scores, weights = capture_scores(model, position_ids)
        statistics = attention_statistics(model, TOKENS, position_ids)
        assert len(statistics) == 2
        for layer, actual, *tensors in zip(model.model.layers, statistics, scores, weights):
            assert actual == pytest.approx(expected_statistics(layer.self_attn, *tensors, position_ids), rel=1e-9)
        if "relu" in switches.values():
            assert all(layer["zero_rows"] > 0 for layer in statistics)

    @pytest.mark.parametrize(
        "implementation, switches",
        [
            ("nlq", {}),
            ("sdpa", {"attention_sink": "learned"}),
            ("nlq_tiled", {"attention_activation": "squared"}),
            ("flex_attention", {"attention_activation": "squared"}),
            (None, {"attention_activation": "relu"}),
        ],
        ids=str,
    )
    def test_same_for_every_backend(self, implementation, switches, make_model):
        expected = attention_statistics(make_model(**switches), TOKENS, PACKED)
        model = make_model(implementation=implementation, **switches)
        before = model.config._attn_implementation
        assert attention_statistics(model, TOKENS, PACKED) == expected
        assert model.config._attn_implementation == before and before != "eager"

    @pytest.mark.parametrize(
        "parts",
        [
            {"forget_gate": "learned", "attention_length_scaling": "log", "value_residual": "learned"},
            {"canon": "ABCD", "parallax": True},
            {"selective_attention": True, "attention_activation": "sigmoid"},
            {"attention_activation": "stick_breaking", "sliding_window": 4},
        ],
        ids=lambda parts: "+".join(parts),
    )
    def test_parts_that_change_weights(self, make_model, monkeypatch, parts):
        monkeypatch.setattr(stability, "QUERY_CHUNK", 4)
        model = make_model(**MODERN, query_projection="linear", **parts)
        with torch.no_grad():
            attentions = model(TOKENS, output_attentions=True, use_cache=False).attentions
        sees_own_key = model.config.activation.sees_own_key
        for weights, record in zip(attentions, attention_statistics(model, TOKENS), strict=True):
            weights = weights[:, :, 1 if sees_own_key else 2 :].abs()  # of queries that see several keys
            entropy = torch.special.entr(weights / weights.sum(dim=-1, keepdim=True)).sum(dim=-1).mean().item()
            assert record["entropy"] == pytest.approx(entropy, rel=1e-5)
            assert record["largest_weight"] == pytest.approx(weights.max().item(), rel=1e-5)

    @pytest.mark.parametrize("layout", ["plain", "window", "packed"])
    def test_measures_of_an_encoder_see_later_keys(self, make_model, monkeypatch, layout):
        sizes = {
            **make_model().config.to_dict(),
            "is_causal": False,
            "sliding_window": 3 if layout == "window" else None,
        }
        model = NLQForMaskedLM(NLQConfig(**sizes, attn_implementation="eager")).eval()
        packed = {"position_ids": PACKED} if layout == "packed" else {}
        with torch.no_grad():
            attentions = model(TOKENS, output_attentions=True, **packed).attentions
        monkeypatch.setattr(stability, "QUERY_CHUNK", 4)
        for weights, record in zip(attentions, attention_statistics(model, TOKENS, *packed.values()), strict=True):
            chosen = weights[(weights > 0).sum(dim=-1) > 1]  # rows of queries that see several keys
            assert record["entropy"] == pytest.approx(torch.special.entr(chosen).sum(dim=-1).mean().item(), rel=1e-5)
            first = (weights > 0).float().argmax(dim=-1, keepdim=True)
            mass = weights.gather(-1, first)[(weights > 0).sum(dim=-1) > 1].mean().item()
            assert record["first_token_mass"] == pytest.approx(mass, rel=1e-5)

    def test_rows_of_zeros(self, make_model):
        for activation in ("relu", "squared"):
            model = make_model(attention_activation=activation, attention_scaling=0.0)
            statistics = attention_statistics(model, TOKENS)[0]
            zero = {"largest_weight": 0.0, "zero_rows": 1.0, "smallest_score": 0.0, "largest_score": 0.0}
            assert statistics == zero

    def test_large_scores_do_not_overflow(self, make_model):
        statistics = attention_statistics(make_model(attention_scaling=1e4), TOKENS)[0]
        assert all(math.isfinite(value) for value in statistics.values())
        assert statistics["largest_weight"] == 1.0

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

    @pytest.mark.parametrize("fails", [False, True], ids=["works", "fails"])
    def test_leaves_the_model_alone(self, fails, make_model, monkeypatch):
        model = make_model(implementation="nlq_tiled", attention_activation="squared", attention_dropout=0.5).train()
        model.model.layers[0].mlp.eval()
        model(TOKENS, labels=TOKENS).loss.backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        modes, random_state = [module.training for module in model.modules()], torch.get_rng_state()
        if fails:
            monkeypatch.setattr(stability, "_row_statistics", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                attention_statistics(model, TOKENS)
        else:
            attention_statistics(model, TOKENS)
        assert all(torch.equal(one.grad, other) for one, other in zip(model.parameters(), gradients))
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
    """A noisy curve that falls from 9 to 4 nats, logged every 10 steps, with some values replaced."""
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
        ([(1, math.nan), (2, math.nan)], [1, 2]),
        ([(index, 4.0 + 2.0 * (index == 9)) for index in range(30)], []),  # too few to compare with
        # Then the median has followed
        ([(index, 4.0 if index < 20 else 6.0) for index in range(40)], [20, 21, 22, 23, 24]),
        ([(index, 4.0 + 0.09 * (index == 20)) for index in range(30)], []),  # less than a tenth
    ],
    ids=["noise", "leaps", "not finite", "only nan", "early", "plateau", "ripple"],
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
    layers = attention_statistics(make_model(attention_activation="entmax15"), TOKENS)
    assert all("entropy" in layer and "smallest_log_normalizer" not in layer for layer in layers)
