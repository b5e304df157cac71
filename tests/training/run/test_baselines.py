"""Models of other families as baselines: what their configurations say in other names, or not at all."""

import copy
import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForSeq2SeqLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from modeling_nlq.training import evaluate, train
from modeling_nlq.training.loading import load_config
from modeling_nlq.training.run.generation import generate_text
from modeling_nlq.training.run.objectives import name_for
from modeling_nlq.training.size import (
    ModelKind,
    auto_class_of,
    kind_of,
    matching_intermediate_size,
    measure,
    positions_of,
)
from nlq import main


_BERT = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 66}
_BERT |= {"num_hidden_layers": 2, "num_attention_heads": 2}
_BART = {"vocab_size": 300, "d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2}
_BART |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
_LED = {"max_encoder_position_embeddings": 72, "max_decoder_position_embeddings": 66, "attention_window": 8}
_BERT2BERT = {
    "encoder": {"model_type": "roberta", **_BERT},
    "decoder": {"model_type": "bert", **_BERT, "is_decoder": True, "add_cross_attention": True},
}
FAMILIES = {
    "t5": {"vocab_size": 300, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2},
    "bloom": {"vocab_size": 300, "hidden_size": 16, "n_layer": 2, "n_head": 2},
    "roberta": _BERT,
    "mpt": {"vocab_size": 300, "d_model": 16, "n_layers": 2, "n_heads": 2, "max_seq_len": 66},
    "mamba": {"vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
    "led": {**_BART, **_LED},
    "encoder-decoder": _BERT2BERT,
    "xlnet": {"vocab_size": 300, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24},
}
_NLQ = {"attention_gate": "value", "decoder": {"num_key_value_heads": 1, "num_hidden_layers": 3}}
PAIRS = {
    "t5": CONFIG_MAPPING["t5"](**FAMILIES["t5"], num_decoder_layers=3),
    "encoder-decoder": CONFIG_MAPPING["encoder-decoder"](**_BERT2BERT),
    "bart": CONFIG_MAPPING["bart"](**_BART),
    "nlq": load_config("tiny-seq2seq", _NLQ),
}
# By the number of tokens; `None`: any
POSITIONS = {"mpnet": 64, "roberta": 64, "bert": 66, "mpt": 66, "t5": None, "bloom": None, "xlnet": None}


@pytest.fixture(scope="module")
def make_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("baselines")
    rows = [{"text": f"the number {i} is before {i + 1} and {i + 2}. " * 3, "to": f"{i + 1}"} for i in range(40)]
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(family: str, **fields) -> tuple[str, str]:
        model, recipe = folder / f"{family}.json", folder / f"{family}.yaml"
        model.write_text(json.dumps({"model_type": family, **FAMILIES[family]}))
        content = {"model": str(model), "dataset": str(folder / "text.jsonl"), "tokenizer": "bpe:300"}
        content |= {"validation_fraction": 0.2, "objective": name_for(kind_of(load_config(str(model))))}
        pairs = {"source_column": "text", "target_column": "to", "max_source_length": 66, "max_target_length": 16}
        content |= pairs if content["objective"] == "seq2seq" else {"block_size": 32}
        content["training"] = {"max_steps": 2, "per_device_train_batch_size": 2, "report_to": "none", "use_cpu": True}
        recipe.write_text(json.dumps(content | fields))
        return str(recipe), str(folder / "text.jsonl")

    return make


@pytest.mark.thin(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_trains_evaluates_and_generates(family, make_run, tmp_path):
    fields = {"max_source_length": 64} if family == "encoder-decoder" else {}  # a RoBERTa reads
    recipe, text = make_run(family, **fields)
    metrics = train(recipe, output_dir=tmp_path / "run")
    assert (metrics.data.steps == 2 and not metrics.losses.diverged) or family == "t5"  # whose first logits are large
    assert evaluate(tmp_path / "run", text)["eval_loss"] > 0
    if kind_of(load_config(str(tmp_path / "run"))) is not ModelKind.ENCODER:
        generate_text(str(tmp_path / "run"), "the number 3", 5, temperature=0.0)
    card = (tmp_path / "run" / "README.md").read_text()
    assert ("context of" in card) == (family not in ("t5", "bloom", "mamba", "xlnet"))


@pytest.mark.thin(2)
@pytest.mark.parametrize("family, positions", POSITIONS.items(), ids=POSITIONS)
def test_positions_are_as_many_as_a_model_can_read(family, positions):
    config = CONFIG_MAPPING[family](**FAMILIES.get(family, _BERT))
    assert positions_of(config) == positions
    model = auto_class_of(config).from_config(config).eval()
    for length in (positions or 99, (positions or 98) + 1):
        tokens = torch.full((1, length), 5)
        inputs = {"input_ids": tokens, **({"decoder_input_ids": tokens} if config.is_encoder_decoder else {})}
        if positions in (None, length):
            assert model(**inputs).logits.shape[1] == length
        else:
            with pytest.raises((IndexError, RuntimeError, ValueError)):
                model(**inputs)


def test_too_long_for_roberta(make_run, tmp_path, capsys):
    recipe, text = make_run("roberta")
    train(recipe, output_dir=tmp_path / "run")
    assert main(["train", recipe, "--block_size", "65", "--output_dir", str(tmp_path / "long")]) == 1
    message = "block_size=65 exceeds max_position_embeddings=66 less the 2 up to the id of the pad token"
    assert message in capsys.readouterr().err
    with pytest.raises(ValueError, match="block_size=65 exceeds the 64 positions"):
        evaluate(tmp_path / "run", text, block_size=65)


@pytest.mark.parametrize("source, target", [(24, 24), (32, 4), (3, 30)])
@pytest.mark.parametrize("family", PAIRS)
def test_flops_of_a_pair_equal_those_pytorch_counts(family, source, target):
    """Tokens of source and target are counted together, each with the matrices that it passes through."""
    with torch.device("meta"):
        model = AutoModelForSeq2SeqLM.from_config(copy.deepcopy(PAIRS[family]), attn_implementation="eager")
        tokens = [torch.zeros(1, length, dtype=torch.long) for length in (source, target)]
    with FlopCounterMode(display=False) as counter:
        model(tokens[0], decoder_input_ids=tokens[1], use_cache=False)
    counted = 3 * counter.get_total_flops() / (source + target)
    tolerance = 0.04 if family == "encoder-decoder" else 1e-5  # BERT's pooler multiplies the first token only
    assert measure(PAIRS[family], (source, target)).flops_per_token == pytest.approx(counted, rel=tolerance)


def test_what_cannot_be_answered_is_one_line():
    t5, bloom = (CONFIG_MAPPING[family](**FAMILIES[family]) for family in ("t5", "bloom"))
    with pytest.raises(ValueError, match="context=None: a T5Config does not say how long a text is; give --context"):
        measure(t5)
    assert measure(CONFIG_MAPPING["prophetnet"](vocab_size=64, hidden_size=32), 64).flops_per_token
    size = measure(t5, 64)
    assert size.flops_per_token > 6 * size.non_embedding
    with pytest.raises(ValueError, match="match='parameters' widens intermediate_size, and BloomConfig has none"):
        matching_intermediate_size(bloom, size)
    with pytest.raises(ValueError, match="Transformers makes no language model of this MarianConfig: Padding_idx"):
        measure(CONFIG_MAPPING["marian"](**_BART))
