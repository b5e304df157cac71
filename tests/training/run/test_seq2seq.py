"""Runs of an encoder with a decoder: pairs of texts, resumption, evaluation, generation, size and refusals."""

import ast
import importlib.util
import json
import re

import pytest
import sacrebleu
from support.runs import HALF, PAIR_SWITCHES, write_comparison
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from modeling_nlq import NLQForConditionalGeneration
from modeling_nlq.training import evaluate, explore, train
from modeling_nlq.training.api import load_plan
from modeling_nlq.training.loading import initialize_by_name, load_config
from modeling_nlq.training.run.data import prepare_data, save_blocks
from modeling_nlq.training.run.documents import docstring_pairs
from modeling_nlq.training.run.generation import generate_text
from modeling_nlq.training.run.recipe import load_recipe
from modeling_nlq.training.run.seq2seq import chrf_of
from nlq import main


@pytest.fixture(scope="module")
def pair_run(pairs_recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair") / "run"
    return folder, train(pairs_recipe, output_dir=folder, explore=True)


def test_a_run_of_pairs_generates(pair_run, pairs_recipe, capsys):
    folder, metrics = pair_run
    assert metrics.data.steps == 40 and metrics.losses.validation.bits_per_byte > 0
    assert 0 < metrics.losses.validation.chrf < 100
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.decoder_start_token_id == tokenizer.bos_token_id == tokenizer.eos_token_id
    again = evaluate(folder, pairs_recipe.with_suffix(".jsonl"), validation_fraction=0.2)
    assert again["eval_loss"] == pytest.approx(metrics.losses.validation.loss, rel=1e-6)
    assert again["eval_chrf"] == metrics.losses.validation.chrf
    assert not generate_text(str(folder), "one two", temperature=0.0, max_new_tokens=4).startswith("one two")
    card = (folder / "README.md").read_text()
    assert "An encoder and decoder made with NLQ" in card and "chrF of generated text" in card
    example = card.partition("```python\n")[2].partition("```")[0]
    exec(re.sub(r'from_pretrained\("[^"]*"', f'from_pretrained("{folder}"', example), {})
    assert main(["params", str(folder)]) == 0
    assert main(["convert", str(folder), str(folder.parent / "other")]) == 1
    assert "nlq_seq2seq" in capsys.readouterr().err.splitlines()[-1]


def test_pages_show_source_and_target(pair_run, run):
    folder, _ = pair_run
    assert '"source": [' in (folder / "explore.html").read_text()
    assert explore(folder, text="one two", output=None).tokens[0] == "<|endoftext|>"
    done = explore(folder, folder, text="one two", target="two one", output=None)
    assert "".join(done.tokens) == "<|endoftext|>two one<|endoftext|>"
    weights = {layer.name: layer.weights.shape for layer in done.models[0].layers}
    source = len(AutoTokenizer.from_pretrained(folder)("one two")["input_ids"]) + 1
    assert weights == {"0": (2, len(done.tokens), len(done.tokens)), "0 cross": (2, len(done.tokens), source)}
    with pytest.raises(ValueError, match="--target: only an encoder with a decoder has a target"):
        explore(run[0], text="one", target="two", output=None)


def test_its_code_is_published(pair_run, capsys):
    assert main(["publish", str(pair_run[0]), "anna/pair", "--dry-run"]) == 0
    assert " modeling_seq2seq_nlq.py\n" in capsys.readouterr().out


def test_evaluation_of_another_file(pair_run, pairs_recipe, tmp_path):
    (folder, _), pairs, own = pair_run, pairs_recipe.with_suffix(".jsonl"), tmp_path / "own.jsonl"
    own.write_text(pairs.read_text().replace("given", "a").replace("wanted", "b"))
    found = evaluate(folder, own, source_column="a", target_column="b")
    assert found["eval_loss"] == evaluate(folder, pairs)["eval_loss"]
    assert evaluate(folder, pairs, batch_size=3)["eval_loss"] == pytest.approx(found["eval_loss"], rel=1e-5)
    with pytest.raises(ValueError, match="packing='documents' does not go with a model of objective='seq2seq'"):
        evaluate(folder, own, packing="documents")


def test_chrf_is_taken_against_whole_targets(pairs_recipe, tmp_path, monkeypatch):
    text = "one two three four five six seven"
    (tmp_path / "long.jsonl").write_text("\n".join(json.dumps({"given": f"{i}", "wanted": text}) for i in range(60)))
    recipe = load_recipe(pairs_recipe, {"dataset": str(tmp_path / "long.jsonl"), "max_target_length": 4})
    tokenizer, blocks, fingerprint = prepare_data(recipe, tmp_path / "data")
    save_blocks(blocks, fingerprint, tmp_path / "data")
    pairs = prepare_data(recipe, tmp_path / "data")[1]["validation"]
    cut, count = tokenizer.decode(pairs.dataset[0]["labels"], skip_special_tokens=True), len(pairs.dataset)
    monkeypatch.setattr(NLQForConditionalGeneration, "generate", lambda *_, **__: pairs.dataset["labels"][:32])
    model = NLQForConditionalGeneration(load_config("tiny-seq2seq", PAIR_SWITCHES))
    found = chrf_of(model, tokenizer, pairs, recipe)["eval_chrf"]
    assert found == sacrebleu.corpus_chrf([cut] * count, [[text] * count]).score < 60 and text.startswith(cut)


def test_what_is_said(pairs_recipe, tmp_path, monkeypatch, caplog):
    found = importlib.util.find_spec
    without = lambda name, *more: None if name == "sacrebleu" else found(name, *more)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", without)
    metrics = train(pairs_recipe, output_dir=tmp_path / "run", max_steps=1, eval_steps=1)
    assert "of 80 pairs are longer than max_source_length=24 or max_target_length=16 tokens, and" in caplog.text
    assert caplog.text.count("chrF of generated text needs sacrebleu: pip install modeling-nlq[seq2seq]") == 1
    assert metrics.losses.validation.chrf is None and metrics.losses.validation.loss > 0


def test_initial_values():
    """Each half by its own settings and depth, in which the decoder's cross-attention counts."""
    halves = {"encoder": {**HALF, "initializer_range": 0.1}, "decoder": {**HALF, "initializer_range": 0.5}}
    model = NLQForConditionalGeneration(load_config("tiny-seq2seq", halves))
    for parameter in model.parameters():
        parameter.data.fill_(7.0)
    initialize_by_name(model, 0)
    encoder, decoder = (half.layers[0].self_attn.o_proj.weight for half in (model.model.encoder, model.model.decoder))
    assert encoder.std().item() == pytest.approx(0.1 / 2**0.5, rel=0.1)
    assert decoder.std().item() == pytest.approx(0.5 / 3**0.5, rel=0.1)
    assert not any(parameter.eq(7.0).any() for parameter in model.parameters())


def test_built_in_corpus():
    pairs = [pair for pair, _ in zip(docstring_pairs(""), range(200))]
    for pair in pairs:
        (function,) = ast.parse(pair["source"]).body
        assert ast.get_docstring(function) is None and "\n" not in pair["target"] and " " in pair["target"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"objective": "causal"}, "model 'tiny-seq2seq' is an encoder and decoder; set objective: seq2seq"),
        ({"objective": "causal"}, "max_source_length=24 does not go with objective='causal'"),
        ({"max_source_length": 99}, "max_source_length=99 exceeds max_position_embeddings=24"),
        ({"source_column": "text"}, "has no column 'text'; set source_column to one of given, wanted"),
        ({"switches": {"decoder": {"cross_attenton": {}}}}, "tiny-seq2seq: decoder.* has no field 'cross_attenton'"),
    ],
)
def test_wrong_recipes_are_refused_by_name(pairs_recipe, tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        train(pairs_recipe, output_dir=tmp_path / "run", **fields)


def test_plan_of_a_comparison(pairs_recipe, capsys, tmp_path):
    models = {"sees": None, "blind": {"switches": {"decoder": {"cross_attention": False}}}}
    fields = {"recipe": str(pairs_recipe), "models": models, "baseline": "sees"}
    fields |= {"switches": {"decoder": {"attention_activation": "relu"}}}
    file = write_comparison(tmp_path, **fields)
    assert main(["compare", file, "--dry-run", "--output_dir", str(tmp_path / "results")]) == 0
    assert "time on this machine: about" in capsys.readouterr().out
    for name, variant in load_plan(file).largest.variants.items():
        own = variant.model_config["decoder"]
        assert own["attention_activation"] == "relu" and (own["cross_attention"] is False) == (name == "blind")
    with pytest.raises(ValueError, match="match='parameters' widens intermediate_size, and NLQSeq2SeqConfig has none"):
        load_plan(write_comparison(tmp_path, **fields, match="parameters"))
