"""What the tests of publishing share: a Hub, clients of it, and published models."""

import copy
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from support.hub_server import HubServer
from support.inline_engine import InlineEngine
from support.publishing_cases import (
    MODELS,
    OTHER_TOKEN,
    TOKEN,
    Publication,
    Worker,
    change_weights,
    check_refused,
    outputs,
)
from support.remote_code import WITHOUT_THIS_PACKAGE
from support.runs import write_comparison
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from modeling_nlq import NLQForMaskedLM, NLQForSequenceClassification, NLQModel
from modeling_nlq.training.api import load_plan
from modeling_nlq.training.comparison.report import write_report
from modeling_nlq.training.comparison.run import run_comparison


@pytest.fixture(scope="session")
def server():
    with HubServer({TOKEN: "anna", OTHER_TOKEN: "bert"}) as server:
        yield server
    assert server.unknown == []


@pytest.fixture(scope="session")
def nlq(server, tmp_path_factory):
    home = tmp_path_factory.mktemp("nlq") / "home"
    worker = Worker(home, server.client_environment(home, TOKEN))
    yield worker
    worker.close()


@pytest.fixture(scope="session")
def elsewhere(server, tmp_path_factory):
    home = tmp_path_factory.mktemp("elsewhere") / "home"
    worker = Worker(home, {**server.client_environment(home), "PYTHONPATH": ""}, before=WITHOUT_THIS_PACKAGE)
    yield worker
    worker.close()


@pytest.fixture
def copy_run(run, tmp_path):
    def copy(name: str = "copy") -> Path:
        return shutil.copytree(run[0], tmp_path / name, ignore=shutil.ignore_patterns("checkpoint-*"))

    return copy


@pytest.fixture
def refuses(server, nlq):
    def check(*arguments: object, words: tuple[str, ...] = (), without: str | None = None) -> None:
        before = len(server.requests)
        done = nlq("publish", *arguments)
        check_refused(done, *words)
        assert without is None or without not in done.err
        assert server.requests[before:] == []

    return check


@pytest.fixture(scope="session")
def published(server, nlq, run, tmp_path_factory) -> Publication:
    folder = shutil.copytree(run[0], tmp_path_factory.mktemp("machine") / "runs" / "first")
    expected = {name: outputs(folder, name) for name in MODELS}
    nlq.publish(folder, "anna/model")
    first = server.commits("anna/model")[0]
    change_weights(folder)
    nlq.publish(folder, "anna/model")
    second = server.commits("anna/model")[0]
    expected = {first: expected, second: {name: outputs(folder, name) for name in MODELS}}
    return Publication(folder, first, second, expected)


@pytest.fixture(scope="session")
def comparison(recipe_file, corpus, tmp_path_factory) -> tuple[Path, dict]:
    models = {"base": None, "linear queries": {"switches": {"query_projection": "linear"}}}
    training = {"max_steps": 4, "save_steps": 4, "eval_steps": 4, "report_to": "none"}
    file = write_comparison(
        tmp_path_factory.mktemp("comparison"), recipe=str(recipe_file), models=models, training=training
    )
    folder = tmp_path_factory.mktemp("compared") / "results"
    engine = InlineEngine()
    engine.draws_losses = True
    results = run_comparison(load_plan(file, {"dataset": corpus}), folder, engine)
    write_report(results, folder)
    return folder, results


@pytest.fixture(scope="session")
def converted(nlq, run, tmp_path_factory) -> tuple[Path, Path]:
    """A GPT-2 whose card names its base, and one without card, both converted, with the run's tokenizer."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("gpt2")
    sizes = {"vocab_size": 512, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
    sizes |= {"bos_token_id": 0, "eos_token_id": 0}
    for name, options in {"with-card": ["--upcycle"], "without": []}.items():
        GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(folder / name)
        AutoTokenizer.from_pretrained(run[0]).save_pretrained(folder / name)
        if name == "with-card":
            card = "---\nlicense: mit\nbase_model: openai-community/gpt2\n---\n# Mine\n"
            (folder / name / "README.md").write_text(card)
        done = nlq("convert", folder / name, folder / f"{name}-nlq", *options)
        assert done.status == 0, done.err
    return folder / "with-card-nlq", folder / "without-nlq"


@pytest.fixture(scope="session")
def fine_tune(nlq, recipe_file, tmp_path_factory):
    def make(model: str | Path) -> Path:
        folder = tmp_path_factory.mktemp("tuned") / "run"
        recipe = {**yaml.safe_load(recipe_file.read_text()), "model": str(model), "tokenizer": str(model)}
        recipe["training"].update(max_steps=2, save_steps=2, eval_steps=2, report_to="none")
        (folder.parent / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        done = nlq("train", folder.parent / "recipe.yaml", "--output_dir", folder)
        assert done.status == 0, done.err
        return folder

    return make


@pytest.fixture(scope="session")
def heads(server, nlq, run, make_model, tmp_path_factory) -> dict[str, str]:
    tokenizer = AutoTokenizer.from_pretrained(run[0])
    sizes = {"vocab_size": 512, "pad_token_id": 0, "num_labels": 3, "tie_word_embeddings": False}
    config = make_model(**sizes).config
    encoder = copy.deepcopy(config)
    encoder.is_causal = False
    repositories = {}
    for head in (NLQForSequenceClassification, NLQForMaskedLM, NLQModel):
        folder = tmp_path_factory.mktemp("heads") / head.__name__
        head(encoder if head is NLQForMaskedLM else config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        auto_class = "Auto" + head.__name__.replace("NLQ", "Model", 1).replace("ModelModel", "Model")
        repositories[auto_class] = f"anna/{head.__name__}"
        nlq.publish(folder, repositories[auto_class])
    return repositories
