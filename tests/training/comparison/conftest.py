"""What the tests of comparisons share: one finished comparison."""

from pathlib import Path

import pytest
from support.inline_engine import InlineEngine

from modeling_nlq.training.api import load_plan
from modeling_nlq.training.comparison.run import run_comparison
from modeling_nlq.training.files import read_yaml


@pytest.fixture(scope="session")
def finished(make_file, recipe_file, tmp_path_factory) -> tuple[Path, dict, str]:
    models = {
        "base": None,
        "twin": None,
        # Logits between -0.1 and 0.1 cannot say much, whatever the seed
        "planted": {"switches": {"final_logit_softcapping": 0.1}},
        "absurd": {"learning_rates": [1e3, 1e30]},  # one ends far off, one in NaN
        "one rate absurd": {"learning_rates": [1e-2, 1e3]},
    }
    training = {"max_steps": 8, "save_steps": 8, "eval_steps": 4, "report_to": "none"}
    recipe = {**read_yaml(Path(recipe_file)), "stability_steps": 1, "max_validation_documents": 8}
    fields = {"learning_rates": [1e-2], "seeds": [0, 1, 2]}
    file = make_file(recipe=recipe, models=models, training=training, **fields)
    folder = tmp_path_factory.mktemp("compared") / "results"
    return folder, run_comparison(load_plan(file), folder, InlineEngine()), file
