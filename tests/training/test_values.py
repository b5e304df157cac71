"""Typed values: each field refuses a value of another type, in one line that says what is allowed."""

import dataclasses
import re
from typing import Any, get_args, get_type_hints

import pytest

from modeling_nlq.training.comparison.config import (
    ComparisonConfig,
    ConfirmConfig,
    FactorConfig,
    ModelConfig,
    ScaleConfig,
    SearchConfig,
)
from modeling_nlq.training.comparison.inference import Verdict
from modeling_nlq.training.result import Attention, Data, Evaluation, Losses, Machine, RunResult
from modeling_nlq.training.run.recipe import Recipe, load_recipe
from modeling_nlq.training.run.run_folder import RunProgress
from modeling_nlq.training.size import Size
from modeling_nlq.training.values import from_json


# The arguments without which each class cannot be made
VALUES = {
    Recipe: {"model": "tiny-linear"},
    Losses: {"diverged": False},
    Data: {"steps": 1, "tokens_seen": 1, "token_stream": ""},
    RunResult: {"losses": Losses(False), "data": Data(1, 1, "")},
    SearchConfig: {"start": 1e-3},
    ComparisonConfig: {"name": "a", "recipe": {}, "baseline": "base", "models": {"base": ModelConfig()}},
    **{kind: {} for kind in (Evaluation, Machine, Attention, ModelConfig, FactorConfig, ScaleConfig, ConfirmConfig)},
}
# The same as JSON, for classes that are read alone
JSON = {kind: VALUES[kind] for kind in (Evaluation, Losses, Data, Machine, Attention)}
JSON |= {RunProgress: {"host": "a", "pid": 1}, Size: dict.fromkeys(Size.__dataclass_fields__, 1)}
# What JSON or YAML may hold in place of a value; the first that a type does not allow is tried
OTHERS = (["wrong"], {"wrong": "wrong"}, "wrong", True)


def fields_of(*kinds: type) -> list:
    """Returns each field of each class, with a value that its type does not allow."""
    cases = []
    for kind in kinds:
        for field in dataclasses.fields(kind):
            types = {getattr(part, "__origin__", part) for part in _parts(get_type_hints(kind)[field.name])}
            is_mapping = dict in types or any(map(dataclasses.is_dataclass, types))
            allowed = {list: list in types, dict: is_mapping, str: str in types, bool: bool in types}
            wrong = next(value for value in OTHERS if not allowed[type(value)])
            cases.append(pytest.param(kind, field.name, wrong, id=f"{kind.__name__}.{field.name}"))
    return cases


def _parts(kind: Any) -> tuple:
    return get_args(kind) if type(None) in get_args(kind) or len(get_args(kind)) > 2 else (kind,)


@pytest.mark.parametrize(("kind", "name", "wrong"), fields_of(*VALUES))
def test_field_of_another_type(kind, name, wrong):
    with pytest.raises(ValueError, match=rf"^{name}={re.escape(repr(wrong))} must be [^\n]+$"):
        kind(**VALUES[kind] | {name: wrong})


@pytest.mark.parametrize(("kind", "name", "wrong"), fields_of(*JSON))
def test_field_of_another_type_in_json(kind, name, wrong):
    with pytest.raises(ValueError, match=rf"^file: {name}={re.escape(repr(wrong))} must be [^\n]+$"):
        from_json(kind, JSON[kind] | {name: wrong}, "file: ")


def test_verdicts_of_older_files():
    assert from_json(Verdict, "diverged in 1 of 3 runs") is Verdict.SOME_DIVERGED
    with pytest.raises(ValueError, match=r"^verdict='diverging' must be "):
        from_json(Verdict, "diverging", "verdict.")


@pytest.mark.parametrize(
    ("name", "value"),
    [("learning_rate", "fast"), ("max_steps", "1.5"), ("bf16", "perhaps"), ("warmup_steps", "[1]"), ("seed", "true")],
)
def test_training_arguments_in_text(name, value):
    with pytest.raises(ValueError, match=rf"^{name}=.* must be [^\n]+$"):
        load_recipe("demo", {name: value})


def test_numbers_in_text():
    recipe = load_recipe("demo", {"learning_rate": "1e-3", "max_steps": "3", "block_size": "16", "bf16": "false"})
    assert recipe.training | {"learning_rate": 1e-3, "max_steps": 3, "bf16": False} == recipe.training
    assert recipe.block_size == 16
