"""CompleteP: equal to the multipliers of the paper."""

import copy

import pytest
import torch
from torch import nn
from transformers import TrainingArguments

from modeling_nlq import AttentionPart, NLQConfig, NLQForCausalLM, parts_user_nlq, register_attention_part
from modeling_nlq.training import train
from modeling_nlq.training.loading import initialize_by_name
from modeling_nlq.training.run.conflicts import check_recipe
from modeling_nlq.training.run.parametrization import (
    Factors,
    check_completep,
    completep_factors,
    scale_initial_values,
    split_groups,
)
from modeling_nlq.training.run.recipe import load_recipe


pytestmark = pytest.mark.thin(2)


RATE, DECAY, EPSILON = 0.01, 0.1, 1e-3


def make_config(width=32, depth=2, **switches) -> NLQConfig:
    fields = {"vocab_size": 64, "max_position_embeddings": 16, "num_attention_heads": width // 8, "use_bias": True}
    return NLQConfig(**{**fields, "hidden_size": width, "num_hidden_layers": depth, **switches})


def make_model(config: NLQConfig, seed: int = 0) -> NLQForCausalLM:
    model = NLQForCausalLM(config).double()
    initialize_by_name(model, seed)
    return model


def make_optimizer(model, factors=None) -> torch.optim.AdamW:
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, eps=EPSILON)
    if factors is not None:
        split_groups(optimizer, model, factors)
    return optimizer


def train_steps(model, optimizer, steps=6, seed=0) -> list[float]:
    random = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        ids = torch.randint(64, (4, 16), generator=random)
        logits = model(input_ids=ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())  # in float64
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(
    "switches",
    [
        {"query_projection": "linear"},
        {"query_projection": "nonlinear", "mlp_type": "gated", "norm_type": "rmsnorm", "attention_gate": "headwise"},
        {"canon": "ABCD", "forget_gate": "learned", "position_embedding": "rope", "tie_word_embeddings": False},
        {"value_residual": "learned", "embedding_norm": True, "per_layer_config": {3: {"attention_gate": "headwise"}}},
    ],
    ids=["gpt2", "modern", "untied", "layers differ"],
)
def test_equals_the_multipliers_of_the_paper(switches):
    """Table 1 of arXiv 2505.01618 with alpha = 1, written with multipliers in the forward pass."""
    width, depth = 4, 3
    ours = make_model(make_config(32 * width, 2 * depth, **switches))
    reference = copy.deepcopy(ours)
    factors = completep_factors(ours, {"hidden_size": 32, "num_hidden_layers": 2})
    scale_initial_values(ours, factors)

    hidden, vectors, outer = [], [], []
    embeddings = {module.weight for module in reference.modules() if isinstance(module, nn.Embedding)}
    embeddings.add(reference.lm_head.weight)
    if reference.model.embed_norm is not None:
        embeddings.update(reference.model.embed_norm.parameters())
    for name, module in reference.named_modules():
        if name.endswith(("o_proj", "mlp.fc2", "mlp.down_proj")):
            module.register_forward_hook(lambda module, inputs, output: output / depth)
    reference.model.norm.register_forward_hook(lambda module, inputs, output: output / width)
    for name, parameter in reference.named_parameters():
        if parameter in embeddings or name.startswith("model.norm"):
            outer.append(parameter)
        elif parameter.ndim == 2 and "canon" not in name:  # whose sums have 4 inputs at any width
            hidden.append(parameter)
            with torch.no_grad():
                ends = name.endswith(("o_proj.weight", "mlp.fc2.weight", "mlp.down_proj.weight"))
                # The class divides by the root of twice its own layers, not of its base's
                parameter.mul_(width**-0.5 * (depth**0.5 if ends else 1))
        else:
            vectors.append(parameter)
    matrices = [parameter for parameter in outer if parameter.ndim == 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "eps": EPSILON / width, "weight_decay": DECAY},
            {"params": [p for p in outer if p.ndim == 1], "eps": EPSILON / width, "weight_decay": 0.0},
            {"params": hidden, "lr": RATE / width, "eps": EPSILON / width / depth, "weight_decay": DECAY * width},
            {"params": [p for p in vectors if p.ndim == 1], "eps": EPSILON / width / depth, "weight_decay": 0.0},
            {"params": [p for p in vectors if p.ndim == 2], "eps": EPSILON / width / depth, "weight_decay": DECAY},
        ],
        lr=RATE,
    )
    expected = train_steps(reference, optimizer)
    assert train_steps(ours, make_optimizer(ours, factors)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("width", [64, 43])
def test_a_matched_mlp_has_the_factors_of_any_other(width):
    """The MLP's width may be that which meets a budget: the base model has it in proportion."""
    model = make_model(make_config(64, 2, mlp_type="gated", intermediate_size=width))
    factors = completep_factors(model, {"hidden_size": 32, "num_hidden_layers": 1})
    assert factors["model.layers.0.mlp.down_proj.weight"] == Factors(0.5, 0.25, 0.5)


class _Cube(AttentionPart):
    name = "cube"

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.weight = nn.Parameter(torch.zeros(config.num_attention_heads, config.head_dim, config.hidden_size))

    def change_output(self, call, heads):
        return heads + (self.weight @ call.hidden_states[..., None, :, None])[..., 0]


def test_a_part_of_which_no_factor_is_known_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(parts_user_nlq, "_registered", {})
    monkeypatch.setattr(parts_user_nlq, "_latest", {})
    register_attention_part(_Cube)
    with pytest.raises(ValueError, match="cannot tell which of its 3 dimensions"):
        check_completep(make_config(attention_parts=["cube"]), {"hidden_size": 16}, TrainingArguments(str(tmp_path)))
    with pytest.raises(ValueError, match="needs blocks that add to the residual stream"):
        check_completep(make_config(input_skip=True), {"hidden_size": 16}, TrainingArguments(str(tmp_path)))


def test_the_base_model_is_trained_as_without():
    config = make_config()
    plain, ours = make_model(config), make_model(config)
    factors = completep_factors(ours, {"hidden_size": config.hidden_size})
    assert {*factors.values()} == {Factors(1.0, 1.0, 1.0)}
    scale_initial_values(ours, factors)
    assert train_steps(ours, make_optimizer(ours, factors)) == train_steps(plain, make_optimizer(plain))


class TestRecipe:
    BASE = {"hidden_size": 16, "num_hidden_layers": 1}

    @pytest.mark.parametrize(
        "fields, message",
        [
            ({"base_sizes": None}, "needs the sizes of its base model"),
            ({"parametrization": "standard"}, "'standard' takes none"),
            ({"base_sizes": "{hidden_size: 1"}, "base_sizes='{hidden_size: 1' must be fields and values"),
            ({"base_sizes": {"num_hidden_layers": 1}}, "must give the hidden_size"),
            ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "lr_scheduler_type='reduce_lr_on_plateau' has one lowest"),
            ({"switches": {"norm_position": "post"}}, "needs norm_position='pre' and norm_gain=True"),
            ({"optim": "sgd"}, "optim='sgd': .* needs an AdamW"),
        ],
    )
    def test_wrong_fields_are_refused_before_a_run(self, recipe_file, tmp_path, fields, message):
        fields = {"parametrization": "completep", "base_sizes": self.BASE, **fields}
        with pytest.raises(ValueError, match=message):
            train(recipe_file, output_dir=tmp_path / "run", **fields)
        assert not (tmp_path / "run").exists()

    def test_deepspeed_is_refused(self, recipe_file, tmp_path, monkeypatch):
        options = {"output_dir": tmp_path / "run", "parametrization": "completep", "base_sizes": self.BASE}
        recipe = load_recipe(recipe_file, options)
        monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
        with pytest.raises(ValueError, match="needs Trainer's optimizer"):
            check_recipe(recipe)
