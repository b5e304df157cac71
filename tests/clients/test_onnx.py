"""ONNX: programs of Transformers' and of PyTorch's exporter, run by ONNX Runtime, against the model in PyTorch.

Batch, length, padding and the number of cached tokens differ from those at export.
"""

import pytest
import torch
from support.client_cases import greedy, run_script, trained_model
from support.model_cases import LINEAR_KINDS, PROJECTIONS, ROW_KINDS, SOFTMAX_KINDS
from support.onnx_programs import decode_greedily, export, left_padded
from transformers import AutoTokenizer

from modeling_nlq import NLQForCausalLM
from modeling_nlq.activations_nlq import ATTENTION_ACTIVATIONS, LIBRARY_ACTIVATIONS


LIMIT = 1e-4  # of the absolute error of a logit
# Several layers in one export, which takes seconds. Each pairs an activation, a query and other switches
MIXED = {
    "query_projection": "linear",
    "num_hidden_layers": 3,
    "position_embedding": "rope",
    "num_key_value_heads": 2,
    "per_layer_config": {
        0: {"query_projection": "upcycled", "attention_sink": "learned", "head_projection": True},
        1: {"attention_activation": "sigmoid", "query_projection": "nonlinear", "attention_gate": "elementwise"},
        2: {"attention_activation": "linear_attention", "linear_attention_decay": "learned", "qk_norm": "rms"},
    },
}
# Every activation, in groups of the layers of one model
ROWS = {**ATTENTION_ACTIVATIONS, **LIBRARY_ACTIVATIONS}
KINDS = {**SOFTMAX_KINDS, **ROW_KINDS, **LINEAR_KINDS}
KINDS |= {name: {"attention_activation": name} for name, row in ROWS.items() if row.is_elementwise}
GROUPS = [list(KINDS)[start::7] for start in range(7)]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    return trained_model(tmp_path_factory.mktemp("mixed"), **MIXED)


def test_prompt_and_decoding(mixed, tmp_path):
    model, tokenizer = NLQForCausalLM.from_pretrained(mixed), AutoTokenizer.from_pretrained(mixed)
    words = tokenizer("one two three four five six seven eight nine ten", return_tensors="pt").input_ids[0]
    programs = export(model, left_padded([words[:6], words[2:6]]), tmp_path)
    prompts = [words, words[3:], words[1:8]]
    error, tokens = decode_greedily(model, *programs, prompts, steps=8)
    assert error < LIMIT
    assert tokens.tolist() == [greedy(model, prompt, 8) for prompt in prompts]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(GROUPS)), ids=["+".join(group) for group in GROUPS])
def test_every_activation(number, make_model, tmp_path):
    """The full table of docs/export.md: run with `-m slow -rP` to print the errors."""
    layers = {
        index: {**KINDS[kind], "query_projection": PROJECTIONS[(number + index) % len(PROJECTIONS)]}
        for index, kind in enumerate(GROUPS[number])
    }
    positions = ("learned", "rope", "none")[number % 3]
    switches = {"position_embedding": positions, "num_hidden_layers": len(layers), "per_layer_config": layers}
    model = make_model(implementation="nlq", max_position_embeddings=64, **switches)
    ids = torch.randint(1, 13, (2, 6))
    programs = export(model, left_padded([ids[0], ids[1, 2:]]), tmp_path)
    prompts = list(torch.randint(1, 13, (4, 17)))
    error, _ = decode_greedily(model, *programs, [prompts[0], prompts[1][5:], prompts[2][14:]], steps=4)
    print(f"{', '.join(GROUPS[number])}; {positions}: {error:.1e}")
    assert error < LIMIT


REMOTE = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
sample = tokenizer("three four five six", return_tensors="pt").input_ids
exported = OnnxExporter().export_for_generation(model, {"input_ids": sample}, OnnxConfig(dynamic=True))
prefill, decode = (exported.runners[name] for name in ("prefill", "decode"))
ids = tokenizer("one two three", return_tensors="pt").input_ids
positions = torch.arange(ids.shape[1])[None]
cache = DynamicCache(config=model.config)
name = "cache" if "cache" in model(sample) else "past_key_values"  # since Transformers 5.24, and before
outputs = prefill(input_ids=ids, position_ids=positions, **{name: cache})
found = []
for _ in range(8):
    new = outputs.logits[:, -1:].argmax(-1)
    found.append(new.item())
    cache = outputs[name]
    positions = torch.tensor([[cache.get_seq_length()]])
    outputs = decode(input_ids=new, position_ids=positions, **{name: cache})
print(found)
"""


def test_remote_code(trained):
    """Transformers' runner, for linear attention: no layer has keys, whose length would tell how many tokens are
    cached.
    """
    folder = trained("linear_attention", "nonlinear")
    model, tokenizer = NLQForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("one two three", return_tensors="pt").input_ids[0]
    done = run_script(REMOTE, folder, package=False)
    assert done.splitlines()[-1] == str(greedy(model, prompt, 8)), done
