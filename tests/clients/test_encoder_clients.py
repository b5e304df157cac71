"""Encoders in other people's programs: texts as vectors, adapters, a classifier, and compiled and exported graphs."""

import json

import numpy as np
import openai
import pytest
import torch
from datasets import Dataset
from peft import AutoPeftModelForSequenceClassification, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from support.client_cases import IDS, SIZES, TEXT, make_tokenizer, numbered_texts, run_script
from support.serving import complete, server
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    EuroBertConfig,
    EuroBertForMaskedLM,
    Trainer,
    TrainingArguments,
    pipeline,
)

from modeling_nlq import NLQConfig, NLQForMaskedLM
from modeling_nlq.training import convert, train
from modeling_nlq.training.sharing.adapter import whole_modules, write_adapter


SWITCHES = (
    {"attention_activation": "softmax", "query_projection": "upcycled"},
    {"attention_activation": "sigmoid", "query_projection": "nonlinear", "sliding_window": 8},
    {"attention_activation": "linear_attention", "query_projection": "nonlinear"},
)
TEXTS = ["one two three", "four five six seven eight", "nine"]
LORA = {"target_modules": "all-linear", "init_lora_weights": False}


@pytest.fixture(scope="module", params=SWITCHES, ids=lambda switches: switches["attention_activation"])
def folder(request, tmp_path_factory):
    """An encoder trained a little by `Trainer` on masked words, and its tokenizer."""
    folder, tokenizer = tmp_path_factory.mktemp("encoder"), make_tokenizer()
    tokenizer.chat_template = None  # sentence-transformers would apply it
    tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
    torch.manual_seed(0)
    tokens = {"mask_token_id": tokenizer.mask_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = NLQForMaskedLM(
        NLQConfig(**{**SIZES, "vocab_size": len(tokenizer)}, is_causal=False, **tokens, **request.param)
    )
    ids = torch.tensor(tokenizer(TEXT).input_ids).unfold(0, 24, 1).tolist()
    Trainer(
        model,
        TrainingArguments(
            str(folder / "run"), max_steps=80, learning_rate=5e-3, report_to=[], save_strategy="no", use_cpu=True
        ),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3),
        train_dataset=Dataset.from_dict({"input_ids": ids}),
    ).train()
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def expected(folder) -> np.ndarray:
    """`(texts, hidden)`, the mean over the tokens of each text alone."""
    model, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return np.stack(
            [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0).numpy() for text in TEXTS]
        )


def test_texts_as_vectors(folder, tmp_path):
    encoder = SentenceTransformer(str(folder), device="cpu")
    np.testing.assert_allclose(encoder.encode(TEXTS), expected(folder), atol=1e-5)
    encoder.save(str(tmp_path))
    np.testing.assert_array_equal(
        SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS), encoder.encode(TEXTS)
    )
    features = pipeline("feature-extraction", str(folder), device="cpu")(TEXTS)
    np.testing.assert_allclose([np.mean(rows[0], axis=0) for rows in features], expected(folder), atol=1e-5)


FILL = """
import sys
from transformers import pipeline

fill = pipeline("fill-mask", sys.argv[1], trust_remote_code=True)
print([row["token_str"] for row in fill("one two<|mask|> four five six")])
"""


def test_fill_mask_without_the_package(folder):
    with_package, without = (run_script(FILL, folder, package=package).stdout for package in (True, False))
    assert with_package == without and without.count("'") == 10


def test_fine_tuning(folder, tmp_path):
    """A classifier by `Trainer`, its folder loaded again, and an adapter of it by PEFT."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [" ".join(words) for words in (["one"] * 3, ["two", "one"], ["six"] * 4, ["seven", "six"])] * 8
    rows = Dataset.from_dict({**tokenizer(texts), "labels": [0, 0, 1, 1] * 8})
    options = {"max_steps": 30, "learning_rate": 5e-3, "report_to": [], "save_strategy": "no", "use_cpu": True}

    def train(model):
        collator = DataCollatorWithPadding(tokenizer)
        trainer = Trainer(
            model, TrainingArguments(str(tmp_path / "run"), **options), collator, rows, eval_dataset=rows
        )
        trainer.train()
        prediction = trainer.predict(rows)
        assert (prediction.predictions.argmax(-1) == prediction.label_ids).mean() > 0.9
        return prediction.predictions

    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
    before = train(model)
    model.save_pretrained(tmp_path / "classifier")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "classifier")
    with torch.no_grad():
        logits = again(**tokenizer(texts, padding=True, return_tensors="pt")).logits.numpy()
    np.testing.assert_allclose(logits, before, atol=1e-5)

    torch.manual_seed(0)
    base = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
    adapted = get_peft_model(base, LoraConfig(task_type="SEQ_CLS", **LORA))
    before = train(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    loaded = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "adapter", num_labels=2)
    for model in (loaded, loaded.merge_and_unload()):
        with torch.no_grad():
            logits = model.eval()(**tokenizer(texts, padding=True, return_tensors="pt")).logits.numpy()
        np.testing.assert_allclose(logits, before, atol=2e-5)


@pytest.fixture(scope="module")
def eurobert(tmp_path_factory):
    """The folder of a tiny EuroBERT, untrained, and a text."""
    root, tokenizer = tmp_path_factory.mktemp("eurobert"), make_tokenizer()
    tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
    tokenizer.save_pretrained(root / "model")
    tokens = {
        name: getattr(tokenizer, name) for name in ("mask_token_id", "pad_token_id", "bos_token_id", "eos_token_id")
    }
    config = EuroBertConfig(**{**SIZES, "vocab_size": len(tokenizer)}, **tokens)
    torch.manual_seed(0)
    EuroBertForMaskedLM(config).save_pretrained(root / "model")
    return root / "model", numbered_texts(root / "text.jsonl")


@pytest.mark.parametrize(
    "trained", [{"lora": {"r": 2, "target_modules": "all-linear"}}, {"trainable": "new"}], ids=["lora", "new"]
)
def test_adapters_of_runs(trained, eurobert, tmp_path):
    """By a recipe: a LoRA, and what a conversion added, which the adapter brings to the base."""
    source, text = eurobert
    convert(source, tmp_path / "base", upcycle=True)
    fields = {
        "model": str(tmp_path / "base"),
        "objective": "masked",
        "dataset": str(text),
        "block_size": 32,
        **trained,
    }
    training = {"max_steps": 4, "learning_rate": 1e-2, "save_strategy": "no", "report_to": "none"}
    (tmp_path / "recipe.yaml").write_text(json.dumps({**fields, "validation_fraction": 0.2, "training": training}))
    run, adapter = tmp_path / "run", tmp_path / "run" / "adapter"
    train(tmp_path / "recipe.yaml", output_dir=run)
    if "trainable" in trained:
        names = {name for name in load_file(run / "model.safetensors") if "q_bottleneck" in name}
        model = AutoModelForMaskedLM.from_pretrained(run)
        write_adapter(run, adapter, whole_modules(model, names), None)
    base = AutoModelForMaskedLM.from_pretrained(tmp_path / "base").eval()
    before, expected = (model(IDS).logits for model in (base, AutoModelForMaskedLM.from_pretrained(run).eval()))
    assert (expected - before).abs().max() > 1e-4
    torch.testing.assert_close(
        PeftModel.from_pretrained(base, adapter).eval()(IDS).logits, expected, atol=2e-5, rtol=0
    )


def test_compiled_and_exported(folder):
    """One graph each, whose numbers are the model's, with padding and another length than at export."""
    torch.compiler.reset()
    model = AutoModelForMaskedLM.from_pretrained(folder).eval()
    mask = torch.ones_like(IDS)
    mask[0, :4] = 0
    shapes = {
        name: {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC} for name in ("input_ids", "attention_mask")
    }
    with torch.no_grad():
        exported = torch.export.export(
            model, (), {"input_ids": IDS, "attention_mask": mask}, dynamic_shapes=shapes
        ).module()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        for length in (12, 7):
            inputs = {"input_ids": IDS[:, -length:], "attention_mask": mask[:, -length:]}
            logits = model(**inputs).logits
            for program in (exported, compiled):
                found = program(**inputs).logits
                torch.testing.assert_close(found, logits, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("folder", SWITCHES[:1], indirect=True, ids=["softmax"])
def test_no_server(folder, tmp_path):
    """Transformers' server finds no class of an encoder; other programs ask for text and get one line."""
    log = tmp_path / "log"
    with server(log, "--continuous-batching", package=True) as client, pytest.raises(openai.InternalServerError):
        complete(client, folder, "one two")
    assert "NLQForMaskedLM" in log.read_text().split("Error: ")[-1]
    model = AutoModelForMaskedLM.from_pretrained(folder)
    for refused in (model.generate, model.generate_batch, model.init_continuous_batching):
        with pytest.raises(
            ValueError, match="is_causal=False: an encoder predicts masked tokens; to generate, use NLQForCausalLM"
        ):
            refused(IDS)
