"""Recipes: overrides from the command line and from Python, and conflicts found before data are prepared."""

import math

import pytest

from modeling_nlq.training.run import train as train_module
from modeling_nlq.training.run.conflicts import check_recipe
from modeling_nlq.training.run.recipe import load_recipe, override_words, read_overrides, read_recipe
from nlq import main


WORDS = ["--learning_rate", "1e-3", "--streaming", "--set", "qk_norm=l2", "--set", "attention_gate=None"]
WORDS += ["--report_to", "none"]
YES_AND_NO = ["text_column: no", "tokenizer: 1e3", "dataset: 2026-01-01", "model: on", "on: 1", "switches: {off: 1}"]
YES_AND_NO += ["training: {save_strategy: no}", "training: {report_to: off}", "training: {no: 1}"]


class TestOverrides:
    def test_command_line_and_python_are_one_recipe(self):
        switches = {"qk_norm": "l2", "attention_gate": None}
        overrides = {"learning_rate": 1e-3, "streaming": True, "switches": switches, "report_to": "none"}
        from_words, from_python = (load_recipe("demo", each) for each in (read_overrides(WORDS), overrides))
        assert from_words == from_python
        assert from_words.switches == from_python.switches == switches
        assert from_python.arguments.learning_rate == 1e-3

    def test_no_before_a_field_is_false(self):
        assert read_overrides(["--no_bf16", "--streaming"]) == {"bf16": False, "streaming": True}

    def test_words_are_the_inverse(self):
        overrides = read_overrides(
            [*WORDS, "--lr_scheduler_kwargs", '{"min_lr_rate": 0.2}', "--set", "sliding_window=3"]
        )
        assert read_overrides(override_words(overrides)) == overrides

    @pytest.mark.parametrize(
        ("typed", "read"),
        [(r"{a}\n{b}", "{a}\n{b}"), (r"{a}\t\\n ü", "{a}\t\\n ü"), ("{a}\n{b}", "{a}\n{b}"), (r"\d", r"\d")],
    )
    def test_template_typed_in_a_shell(self, typed, read):
        overrides = read_overrides(["--text_template", typed])
        assert overrides == {"text_template": read} == read_overrides(override_words(overrides))

    @pytest.mark.parametrize("line", YES_AND_NO)
    def test_text_that_yaml_reads_as_something_else(self, line, tmp_path):
        (tmp_path / "recipe.yaml").write_text("model: tiny-linear\n" * ("model" not in line) + line)
        with pytest.raises(ValueError, match=r"recipe.yaml: .* must be text; quote it, because YAML reads off, no"):
            load_recipe(tmp_path / "recipe.yaml")

    def test_fields_of_the_trainer_are_numbers_of_their_type(self):
        for name, value, message in (
            ("max_steps", 2.5, "max_steps=2.5 must be a whole number"),
            ("max_steps", None, "max_steps=None must be a whole number"),
            ("seed", None, "seed=None must be a whole number"),
            ("weight_decay", None, "weight_decay=None must be a finite number"),
            ("save_steps", math.inf, "save_steps=inf must be a finite number"),
            ("metric_for_best_model", 1, "metric_for_best_model=1 must be text or null"),
            ("output_dir", 1, "output_dir=1 must be text"),
        ):
            with pytest.raises(ValueError, match=message):
                read_recipe({"model": "tiny-linear", "training": {name: value}})
        for parts in (1, {"a": 1}, [1]):
            with pytest.raises(ValueError, match=r"parts=.* must be"):
                read_recipe({"model": "tiny-linear", "parts": parts})

    @pytest.mark.parametrize(
        "field, value, message",
        [
            ("gradient_accumulation_steps", 0, "gradient_accumulation_steps=0 must be at least 1"),
            ("per_device_train_batch_size", 0, "per_device_train_batch_size=0 must be at least 1"),
            ("save_only_model", True, "save_only_model=True: a run that resumes needs its optimizer"),
            ("ignore_data_skip", True, "ignore_data_skip=True: a run that resumes would see other data"),
            ("prediction_loss_only", True, "prediction_loss_only=True: evaluations need logits"),
            ("report_to", None, "report_to=None: .*, or set report_to: none"),
            ("bf16_full_eval", True, "bf16_full_eval=True: the model would be saved in 16 bits"),
            ("dataloader_drop_last", True, "dataloader_drop_last=True: evaluations would leave out rows"),
            ("eval_use_gather_object", True, "eval_use_gather_object=True: metrics are computed from gathered"),
            ("restore_callback_states_from_checkpoint", True, "=True: a run restores its own record"),
            ("lr_scheduler_type", "warmup_stable_decay", "lr_scheduler_kwargs={} for .* 'num_decay_steps'"),
            ("lr_scheduler_kwargs", {"foo": 1}, "lr_scheduler_kwargs={'foo': 1} for .* argument 'foo'"),
            (
                "metric_for_best_model",
                "eval_chrf",
                "metric_for_best_model='chrf' must be one of loss, perplexity, bits_per_byte",
            ),
        ],
    )
    def test_arguments_that_spoil_results_are_refused(self, field, value, message):
        recipe = read_recipe({"model": "tiny-linear", "training": {"report_to": "none", field: value}})
        with pytest.raises(ValueError, match=message):
            check_recipe(recipe)

    @pytest.mark.parametrize(
        "recipe, training",
        [
            (
                "demo",
                {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 1e-3}, "learning_rate": 1e-2},
            ),
            ("demo", {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 0.2}}),
            ("demo", {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"factor": 0.5}}),
            ("demo", {"metric_for_best_model": "bits_per_byte"}),
            ("masked-demo", {"metric_for_best_model": "pseudo_perplexity"}),
            ("docstring-demo", {"metric_for_best_model": "eval_token_accuracy"}),
        ],
    )
    def test_arguments_that_fit_pass(self, recipe, training):
        check_recipe(load_recipe(recipe, {**training, "report_to": "none"}))

    def test_what_is_not_measured_is_no_metric_of_the_best_model(self):
        with pytest.raises(
            ValueError, match=r"='bits_per_byte' must be one of loss, pseudo_perplexity, token_accuracy$"
        ):
            check_recipe(load_recipe("masked-demo", {"metric_for_best_model": "bits_per_byte", "report_to": "none"}))

    def test_best_checkpoint_follows_its_metric(self):
        less = ["loss", "perplexity", "pseudo_perplexity", "bits_per_byte", "runtime", "model_preparation_time"]
        for name in (*less, "token_accuracy", "chrf", "samples_per_second", "steps_per_second"):
            for metric in (name, f"eval_{name}"):
                found = [
                    load_recipe("demo", {"metric_for_best_model": metric, **given}).arguments.greater_is_better
                    for given in ({}, {"greater_is_better": True}, {"greater_is_better": False})
                ]
                assert found == [name not in less, True, False], metric


class TestBeforeData:
    @pytest.fixture(autouse=True)
    def no_data(self, monkeypatch):
        monkeypatch.setattr(train_module, "prepare_data", lambda *_, **__: pytest.fail("prepared data"))

    def test_switches_that_do_not_fit_saved_weights(self, run, recipe_file, tmp_path, capsys):
        options = ["--model", str(run[0]), "--tokenizer", str(run[0]), "--output_dir", str(tmp_path / "run")]
        assert main(["train", str(recipe_file), *options, "--set", "query_projection=linear"]) == 1
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("nlq: error")]
        assert "query_projection change parameters of the saved model" in line and "`nlq convert MODEL TARGET" in line
        assert not (tmp_path / "run").exists()

    def test_new_tokenizer_for_saved_weights(self, run, recipe_file, tmp_path, capsys):
        assert main(["train", str(recipe_file), "--model", str(run[0]), "--output_dir", str(tmp_path / "run")]) == 1
        assert f"the weights of '{run[0]}' know another; set --tokenizer {run[0]}" in capsys.readouterr().err


def test_given_holds_no_place_and_no_token():
    places = {"output_dir": "elsewhere", "resume_from_checkpoint": "x"}
    names = {"run_name": "a secret", "project": "of mine", "hub_token": "hf_secret", "hub_model_id": "owner/name"}
    recipe = load_recipe("demo", {**places, **names})
    assert recipe.to_dict() == load_recipe("demo").to_dict()
    for name, value in {**places, **names}.items():
        assert getattr(recipe.arguments, name) == value
    assert recipe.without_tokens().training.keys() == recipe.training.keys() - {"hub_token", "hub_model_id"}
