"""The plan of a comparison: its file, its models and runs, and one line for each mistake."""

import json
import re
from pathlib import Path

import pytest
import torch

from modeling_nlq import NLQConfig, NLQForCausalLM
from modeling_nlq.configuration import names
from modeling_nlq.training.api import load_plan
from modeling_nlq.training.comparison.comparison import Run
from modeling_nlq.training.files import read_yaml
from modeling_nlq.training.loading import load_config
from modeling_nlq.training.size import measure
from nlq import main


class TestPlan:
    def test_dry_run(self, make_file, capsys, tmp_path):
        file = make_file(
            models={"base": None, "wide": {"switches": {"intermediate_size": 256}}},
            learning_rates=[1e-3, 1e-2],
            seeds=[0, 1, 2],
        )
        assert main(["compare", file, "--dry-run", "--output_dir", str(tmp_path / "none")]) == 0
        lines = capsys.readouterr().out.splitlines()
        comparison = load_plan(file).largest
        for line, (name, variant) in zip(lines[1:], comparison.variants.items()):
            size = measure(load_config(variant.recipe.model, variant.recipe.switches), 64)
            assert name in line and f"{size.total:,}" in line and f"{size.flops_per_token:,}" in line
            assert f" {size.flops_per_token * 12 * 8 * 64:.3g} " in line
        assert f"12 runs of {12 * 8 * 64:,} tokens" in lines[3] and not (tmp_path / "none").exists()

    def test_power_warning(self, make_file):
        fields = {"models": dict.fromkeys(("base", *"abcdefgh")), "seeds": [0, 1, 2, 3]}
        assert "may need |t|" not in "\n".join(load_plan(make_file(**fields)).describe())
        plan = "\n".join(load_plan(make_file(learning_rates=[1e-3, 2e-3])).describe())
        assert "warning: of two learning rates" in plan
        assert "may need |t|" in "\n".join(load_plan(make_file(**fields, stop="early")).describe())

    def test_a_short_run_saves_at_its_end_alone(self, make_file):
        load_plan(make_file(training={"max_steps": 12, "save_steps": 50, "logging_steps": 3, "eval_steps": 3}))

    def test_models_without_a_difference(self, make_file):
        """As a switch that the recipe has, too."""
        models = {"base": None, "same": {"switches": {"norm_position": "pre"}}, "other": {"learning_rates": [1e-3]}}
        plan = "\n".join(load_plan(make_file(models=models, learning_rates=[1e-2])).describe())
        assert "warning: models 'base' and 'same' are the same; change a field of one" in plan
        assert plan.count("are the same") == 1

    @pytest.mark.parametrize("match", ["parameters", "flops"])
    def test_models_are_matched_in_size(self, make_file, match):
        models = {
            "base": {"switches": {"query_projection": "linear"}},
            "identity": {"switches": {"query_projection": "identity"}},
        }
        models["as it is"] = {**models["identity"], "match": None}
        variants = load_plan(make_file(models=models, match=match)).largest.variants
        unit = 2 * 2 * 32 * (6 if match == "flops" else 1)  # one more in the MLP: 2 layers, 2 matrices, 32 wide
        field = "flops_per_token" if match == "flops" else "non_embedding"
        base, identity, as_it_is = (getattr(variants[name].size, field) for name in models)
        assert abs(identity - base) <= unit / 2 < base - as_it_is
        assert variants["base"].intermediate_size == variants["as it is"].intermediate_size == 128

    def test_null_takes_a_field_of_the_recipe_back(self, make_file):
        recipe = read_yaml(Path(read_yaml(Path(make_file()))["recipe"]))
        sizes = {"hidden_size": 16}
        models = {"base": None, "other": {"parametrization": None, "base_sizes": None, "model": None}}
        recipe |= {"parametrization": "completep", "base_sizes": sizes}
        plan = load_plan(make_file(recipe=recipe, models=models, match="parameters"))
        base, other = (plan.largest.recipe_of(Run(name, 1e-2, 0), Path("runs")) for name in ("base", "other"))
        assert (base.parametrization, base.base_sizes) == ("completep", sizes)
        assert (other.parametrization, other.base_sizes, other.model) == ("standard", None, base.model)

    @pytest.mark.thin(3)
    @pytest.mark.parametrize("name", names("comparisons"))
    def test_shipped_comparisons(self, name, tmp_path, monkeypatch):
        if name == "parts":
            pytest.importorskip("pydoe")
        if name == "hybrids-confirm" and not hasattr(torch.optim, "Muon"):
            pytest.skip("needs PyTorch 2.9")
        if name == "heal":  # which goes on with models of its user
            monkeypatch.chdir(tmp_path)
            sizes = {"vocab_size": 300, "hidden_size": 8, "num_hidden_layers": 30, "num_attention_heads": 1}
            config = NLQConfig(**sizes, use_bias=True)
            for folder, query in (("pretrained", "linear"), ("pretrained-f", "upcycled")):
                config.query_projection = query
                NLQForCausalLM(config).save_pretrained(tmp_path / "runs" / folder)
        plan = load_plan(name)
        for scale in getattr(plan, "confirmation", plan).scales.values():
            assert scale.power_warning() is None
            for model, variant in scale.variants.items():
                scale.recipe_of(Run(model, variant.rates.first[0], scale.seeds[0]), Path("runs"))
        assert list(plan.describe())


class TestBadInput:
    @pytest.mark.parametrize(
        "fields, message",
        [
            ({"baseline": None}, "baseline=None must be one of the models base, twin"),
            ({"baseline": False, "models": {True: None, False: None}}, "models: the name True must be text; quote it"),
            ({"models": {"base": None}}, "holds only the baseline 'base'"),
            ({"models": {"base": None, "x": "tiny-liner"}}, "did you mean 'tiny-linear'"),
            ({"models": {"base": None, "x": {"training": {"seed": 3}}}}, "model 'x': training: seed: set seeds"),
            ({"models": {"base": None, "x": {"training": {"max_steps": 6}}}}, "model 'x' would see 3,072 tokens"),
            ({"models": {"base": None, "../x": None}}, "model '../x': a name must be made of"),
            (
                {"training": {"max_steps": 12, "save_steps": 3, "logging_steps": 2}},
                "save_steps=3 must be a multiple",
            ),
            ({"seeds": [0, 0]}, "holds a seed twice"),
            ({"learning_rates": None}, "learning_rates is missing"),
            ({"match": "memory"}, "match='memory' must be 'parameters' or 'flops' or null"),
            ({"training": {"max_steps": -1}}, "needs max_steps"),
            ({"training": {"max_step": 1}}, r"\.yaml with .*\.yaml: training: unknown field 'max_step'"),
            ({"weight_decay": 0.1}, "unknown field 'weight_decay'; set it in the section 'training'"),
        ],
    )
    def test_one_line(self, make_file, fields, message, capsys, tmp_path):
        assert main(["compare", make_file(**fields), "--output_dir", str(tmp_path / "out")]) == 1
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert re.search(message, line) and not (tmp_path / "out").exists()

    def test_the_file_gives_a_name_that_no_folder_may_have(self, make_file, tmp_path, capsys):
        file = Path(make_file()).rename(tmp_path / "größe.yaml")
        assert main(["compare", str(file), "--output_dir", str(tmp_path / "out")]) == 1
        assert "größe.yaml: set name, because the file's is refused: 'größe': a name must" in capsys.readouterr().err

    def test_recipe_that_no_comparison_can_use(self, make_file, run, recipe_file):
        with pytest.raises(ValueError, match="test_fraction=0 leaves no test split"):
            load_plan(make_file(), {"test_fraction": 0.0})
        with pytest.raises(ValueError, match="arguments: seed: set seeds and learning_rates"):
            load_plan(make_file(), {"seed": 3})
        recipe = {name: value for name, value in read_yaml(Path(recipe_file)).items() if name != "tokenizer"}
        models = {"base": {"switches": {"vocab_size": 8192}}, "saved": str(run[0])}
        with pytest.raises(ValueError, match=r"model 'saved' has the tokenizer .*, the baseline 'bpe:8192'"):
            load_plan(make_file(recipe=recipe, models=models))
        path = Path(recipe_file).parent / "gpt2.json"
        sizes = {"vocab_size": 512, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
        path.write_text(json.dumps({"model_type": "gpt2", **sizes}))
        of_gpt2 = make_file(models={"base": None, "gpt2": str(path)})
        with pytest.raises(ValueError, match=r"record_stability=True needs an NLQ model, and .* is of type 'gpt2'"):
            load_plan(of_gpt2)
        with pytest.raises(ValueError, match="attn_implementation='nlq' needs an NLQ model"):
            load_plan(of_gpt2, {"record_stability": False, "attn_implementation": "nlq"})
        load_plan(of_gpt2, {"record_stability": False, "attn_implementation": "sdpa"})

    @pytest.mark.parametrize(
        ("model", "overrides", "names"),
        [
            ({"training": {"weight_decay": 0.1}}, {"weight_decay": 0.2}, "weight_decay"),
            ({"switches": {"mlp_bias": True}}, {"switches": {"mlp_bias": False, "use_bias": False}}, "mlp_bias"),
            ({"parametrization": "completep"}, {"parametrization": "standard"}, "parametrization"),
        ],
    )
    def test_field_of_the_command_line_that_a_model_sets_is_refused(self, make_file, model, overrides, names):
        with pytest.raises(ValueError, match=rf"command line: {names}: .*model 'own' sets that"):
            load_plan(make_file(models={"base": None, "own": model}), overrides)

    def test_match_that_no_width_meets(self, make_file, run, recipe_file):
        recipe = {**read_yaml(Path(recipe_file)), "model": str(run[0]), "tokenizer": str(run[0])}
        models = {"base": None, "narrow": {"switches": {"query_projection": "nonlinear", "intermediate_size": 100}}}
        with pytest.raises(ValueError, match=r"'narrow': the switches .*intermediate_size change parameters"):
            load_plan(make_file(models=models, recipe=recipe))
        models = {"base": {"switches": {"intermediate_size": 1}}, "x": {"switches": {"head_projection": True}}}
        with pytest.raises(ValueError, match="model 'x': no MLP width brings the model down to"):
            load_plan(make_file(models=models, match="parameters"))
