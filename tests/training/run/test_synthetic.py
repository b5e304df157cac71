"""Synthetic tasks: rows by another reading of their definitions, splits, runs, and what attention can learn."""

import itertools
import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.runs import interrupt, logged_losses
from transformers import AutoModelForCausalLM, AutoTokenizer

from modeling_nlq.training import evaluate, train
from modeling_nlq.training.run.conflicts import check_recipe
from modeling_nlq.training.run.recipe import Recipe, load_recipe
from modeling_nlq.training.run.synthetic import TASKS, make_splits
from nlq import main


BLANK = "<|blank|>"


def recalled(words: list[str]) -> dict[int, str]:
    """Reads a row from left to right: a key and its value is noted, a key before a blank is asked for."""
    known, answers, place = {}, {}, 0
    while place < len(words):
        key = tuple(itertools.takewhile(lambda word: word[0] == "k", words[place:]))
        place += len(key) or 1
        if key and words[place] != BLANK:
            assert key not in known
            known[key] = list(itertools.takewhile(lambda word: word[0] == "v", words[place:]))
            place += len(known[key])
        elif key:
            answers |= {place + index: word for index, word in enumerate(known[key])}
    return answers


def copied(words):
    start = words.index(">") + 1
    return dict(enumerate((word for word in words[:start] if word[0] == "w"), start))


def induced(words):
    return {place: words[words.index(words[place - 1]) + 1] for place, word in enumerate(words) if word == BLANK}


def odd(words):
    end = words.index("=")
    return {end + 1: str(sum(map(int, words[:end])) % 2)}


SOLUTIONS = dict.fromkeys(("recall", "fuzzy-recall", "noisy-recall"), recalled)
SOLUTIONS |= {"selective-copy": copied, "induction": induced, "parity": odd}
SIZES = {
    "recall": {"pairs": st.integers(1, 4), "length": st.integers(16, 21)},
    "fuzzy-recall": {"pairs": st.integers(1, 3), "length": st.integers(36, 60), "vocabulary": st.integers(4, 9)},
    "noisy-recall": {"pairs": st.integers(1, 4), "length": st.integers(16, 40)},
    "selective-copy": {"copied": st.integers(1, 5), "length": st.integers(12, 20)},
    "memorize": {"vocabulary": st.integers(4, 9), "length": st.integers(10, 21)},
    "induction": {"length": st.integers(8, 20), "test_length": st.integers(8, 20)},
    "parity": {"length": st.integers(10, 12), "test_length": st.integers(13, 20)},
    "reverse": {"length": st.integers(5, 9)},
}


@pytest.mark.parametrize("name", TASKS)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_rows_have_the_answers_of_the_definition(name, data):
    sizes = {field: data.draw(values, label=field) for field, values in SIZES[name].items()}
    task = TASKS[name](rows=60, seed=data.draw(st.integers(0, 9)), **sizes)
    splits, learned, tokens = make_splits(task, 0.2, 0.1), {}, np.array(task.tokens)
    assert {split: len(rows[0]) for split, rows in splits.items()} == {"validation": 12, "test": 6, "train": 42}
    rows = {split: {tuple(row) for row in inputs} for split, (inputs, _) in splits.items()}
    assert len(rows["validation"]) == 12 and len(rows["test"]) == 6  # different ones
    assert not rows["validation"] & rows["train"] and not rows["test"] & (rows["train"] | rows["validation"])
    for inputs, labels in (pair for split in splits.values() for pair in zip(*split)):
        words = [word for word in tokens[inputs] if word != "<|pad|>"]
        answers = {int(place): tokens[labels[place]] for place in np.flatnonzero(labels != -100)}
        assert len(labels) <= task.longest
        if name == "reverse":
            assert [*answers.values()] == [*words[-2::-1], "<|endoftext|>"] and len(words) == task.length + 1
            continue
        assert answers and all(words[place] == BLANK for place in answers)
        if name == "memorize":
            solution = {place: learned.setdefault(words[place - 1], answers[place]) for place in answers}
            assert len(answers) == task.length // 2
        else:
            solution = SOLUTIONS[name](words)
        assert answers == solution


def test_lengths_and_seeds():
    rows = make_splits(TASKS["parity"](rows=2000, length=14, test_length=20), 0.01, 0.1)
    lengths = {split: np.bincount((inputs > 3).sum(axis=1)) for split, (inputs, _) in rows.items()}
    assert np.all(lengths["train"][1:] > 90) and len(lengths["train"]) == 15  # each length as often
    assert np.flatnonzero(lengths["test"]).tolist() == [20]
    first, again, other = (make_splits(TASKS["recall"](rows=50, seed=seed), 0.2, 0.0) for seed in (0, 0, 1))
    assert all(np.array_equal(one, two) for split in first for one, two in zip(first[split], again[split]))
    assert not np.array_equal(first["train"][0], other["train"][0]) and "test" not in first
    # No seed trains on rows that another holds out
    assert not {*map(tuple, first["validation"][0])} & {*map(tuple, other["train"][0])}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"dataset": "synthetic:recal"},
            "dataset='synthetic:recal' must be synthetic: and one of recall, fuzzy",
        ),
        ({"task": {"pair": 3}}, "task: unknown field 'pair'; did you mean 'pairs'?"),
        ({"task": {"pairs": 0}}, "task: pairs=0 must be at least 1"),
        ({"task": {"pairs": "3"}}, "pairs='3' must be a whole number"),
        ({"task": {"pairs": 17}}, "task: length=64 must be at least 68"),
        ({"task": {"vocabulary": 7}}, "task: vocabulary=7 must be at least 8"),
        ({"dataset": "python-stdlib", "task": {}}, "task={} needs dataset: synthetic:NAME, not 'python-stdlib'"),
        ({"block_size": 32}, "block_size=32 does not go with dataset='synthetic:recall'"),
        ({"tokenizer": "bpe:300"}, "tokenizer='bpe:300' does not go with dataset='synthetic:recall'"),
        ({"dataset": "synthetic:reverse"}, "dataset='synthetic:reverse' needs objective: seq2seq"),
        ({"task": {"test_length": 999}}, "task: length=999 exceeds max_position_embeddings=256"),
    ],
)
def test_refusals(fields, message):
    defaults = {"model": "tiny-linear", "dataset": "synthetic:recall", "training": {"output_dir": "-"}}
    with pytest.raises(ValueError, match=re.escape(message)):
        check_recipe(Recipe(**defaults | fields))


def test_too_few_rows():
    with pytest.raises(ValueError, match="task: rows=100: of the 50 different rows for validation only"):
        make_splits(TASKS["parity"](rows=100, length=3), 0.5, 0.0)


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "max_position_embeddings": 16}
TRAINING = {"max_steps": 8, "save_steps": 2, "eval_steps": 4, "logging_steps": 1, "per_device_eval_batch_size": 64}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    content = {"model": "tiny-linear", "dataset": "synthetic:recall", "task": {"pairs": 3, "length": 14, "rows": 500}}
    content |= {"test_fraction": 0.2, "validation_fraction": 0.2, "switches": SMALL, "record_stability": True}
    path = tmp_path_factory.mktemp("synthetic") / "recipe.yaml"
    path.write_text(json.dumps(content | {"training": {**TRAINING, "report_to": "none"}}))
    return path


def test_a_run_resumes_evaluates_and_publishes(file, tmp_path, capsys):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    result = train(file, output_dir=whole, explore=True)
    interrupt(file, output_dir=cut)
    assert train(file, output_dir=cut).losses.test.loss == result.losses.test.loss
    assert logged_losses(cut) == logged_losses(whole)
    assert (cut / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert result.losses.test.loss_parts is None and result.losses.validation.bits_per_byte is None
    assert result.data.train_tokens == 300 * 14

    tokenizer, model = AutoTokenizer.from_pretrained(whole), AutoModelForCausalLM.from_pretrained(whole)
    task = load_recipe(file).synthetic
    assert model.config.vocab_size == len(task.tokens) == len(tokenizer)
    inputs, labels = make_splits(task, 0.2, 0.2)["validation"]
    words = np.array(task.tokens)[inputs]
    assert np.array_equal(tokenizer([" ".join(row) for row in words])["input_ids"], inputs)
    logits = model(**tokenizer([" ".join(row) for row in words], return_tensors="pt")).logits.detach().numpy()
    rows, places = np.nonzero(labels != -100)
    right = logits[rows, places - 1].argmax(axis=-1) == labels[rows, places]
    assert len(right) == 3 * len(inputs) and result.losses.validation.token_accuracy == pytest.approx(right.mean())
    assert evaluate(whole)["eval_loss"] == pytest.approx(result.losses.validation.loss, rel=1e-6)
    assert evaluate(whole, task={"pairs": 2, "length": 14})["eval_token_accuracy"] <= 1
    with pytest.raises(ValueError, match="its words are not those of the tokenizer"):
        evaluate(whole, "synthetic:induction")
    assert (whole / "explore.html").is_file()
    assert main(["publish", str(whole), "you/recall", "--dry-run"]) == 0
    card = (whole / "README.md").read_text()
    assert "synthetic:recall" in card and "\ndatasets:" not in card


def test_a_run_of_pairs(tmp_path):
    half = {"num_hidden_layers": 1, "num_attention_heads": 1, "max_position_embeddings": 8, "hidden_size": 16}
    fields = {"dataset": "synthetic:reverse", "objective": "seq2seq", "task": {"length": 5, "rows": 300}}
    recipe = {"model": "tiny-seq2seq", **fields, "switches": {"encoder": half, "decoder": half}}
    (tmp_path / "pairs.yaml").write_text(json.dumps(recipe | {"training": {**TRAINING, "report_to": "none"}}))
    result = train(tmp_path / "pairs.yaml", output_dir=tmp_path / "run")
    assert 0 < result.losses.validation.loss < 5 and result.data.validation_tokens == 6 * 6
    assert evaluate(tmp_path / "run")["eval_loss"] == pytest.approx(result.losses.validation.loss, rel=1e-6)


ONE, TWO = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}, {"num_hidden_layers": 2}
CANON = {"hidden_size": 64, "num_attention_heads": 1, "num_hidden_layers": 1, "canon": "A"}
LINEAR = {"attention_activation": "linear_attention"}
DELTA = LINEAR | {"linear_attention_update": "delta"}
LEARNED, NARROW = {"position_embedding": "learned"}, {"head_dim": 16}
EIGHT, SIXTEEN = {"pairs": 8, "length": 32}, {"pairs": 16, "length": 64, "vocabulary": 64}
WORDS, BITS = {"length": 64}, {"length": 16, "test_length": 64}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "task", "switches", "steps", "least", "most"),
    [
        pytest.param("induction", WORDS, ONE | TWO | LEARNED, 600, 0.99, 1.0, id="two layers copy"),
        pytest.param("induction", WORDS, ONE | LEARNED, 600, 0.0, 0.2, id="one layer does not"),
        pytest.param("recall", EIGHT, CANON, 200, 0.99, 1.0, id="softmax recalls 8 pairs"),
        pytest.param("recall", EIGHT, CANON | LINEAR, 250, 0.99, 1.0, id="linear attention recalls 8 pairs"),
        pytest.param("recall", SIXTEEN, CANON | NARROW, 250, 0.99, 1.0, id="softmax recalls 16 pairs by 16 channels"),
        pytest.param("recall", SIXTEEN, CANON | NARROW | LINEAR, 250, 0.0, 0.6, id="linear attention does not"),
        pytest.param("parity", BITS, ONE | TWO, 600, 0.45, 0.55, id="softmax does not count to 64"),
    ],
)
def test_what_attention_can_learn(name, task, switches, steps, least, most, tmp_path):
    """Bounds the accuracy of each seed; chance is 5 % in `induction`, 3 % in `recall` and 50 % in `parity`."""
    width = switches["hidden_size"]
    sizes = {"position_embedding": "rope", "max_position_embeddings": 66, "intermediate_size": 2 * width}
    training = {"max_steps": steps, "learning_rate": 8e-3, "warmup_steps": 0.1, "lr_scheduler_type": "cosine"}
    training |= {"weight_decay": 0.1, "adam_beta2": 0.95, "eval_strategy": "no", "save_strategy": "no"}
    training |= {"per_device_train_batch_size": 64 if name == "recall" else 32, "report_to": "none"}
    recipe = {
        "model": "tiny-linear",
        "dataset": f"synthetic:{name}",
        "task": {"rows": 20_000, **task},
        "test_fraction": 0.05,
    }
    recipe |= {"training": training, "switches": {"initializer_range": width**-0.5, **sizes, **switches}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    results = [train(tmp_path / "recipe.yaml", output_dir=tmp_path / str(seed), seed=seed) for seed in range(3)]
    accuracies = [result.losses.test.token_accuracy for result in results]
    assert all(least <= accuracy <= most for accuracy in accuracies), accuracies
