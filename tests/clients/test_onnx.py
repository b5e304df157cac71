"""ONNX: programs of Transformers' and of PyTorch's exporter, run by ONNX Runtime, against the model in PyTorch.

Batch, length, padding and the number of cached tokens differ from those at export.
"""

import onnxruntime
import pytest
import torch
from support.client_cases import greedy, run_script, trained_model
from transformers import AutoTokenizer
from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

from modeling_nlq import NLQForCausalLM


LIMIT = 1e-4  # of the absolute error of a logit
# Several layers in one export, which takes seconds. Each pairs an activation, a query and other switches
MIXED = {
    "query_projection": "linear",
    "num_hidden_layers": 4,
    "position_embedding": "rope",
    "num_key_value_heads": 2,
    "per_layer_config": {
        0: {"query_projection": "upcycled", "attention_sink": "learned"},
        1: {"attention_activation": "sigmoid", "query_projection": "nonlinear", "attention_gate": "elementwise"},
        2: {"attention_activation": "squared", "head_projection": True, "qk_norm": "rms"},
        3: {"attention_activation": "linear_attention", "query_projection": "residual", "linear_attention_decay": "learned"},
    },
}
OTHERS = {
    "attention_activation": "silu",
    "query_projection": "identity",
    "num_hidden_layers": 4,
    "per_layer_config": {
        0: {"attention_activation": "entmax15", "query_projection": "bottleneck", "qk_norm": "l2"},
        1: {"attention_activation": "relu", "attention_normalization": "sum", "attention_output_activation": "gelu"},
        2: {"attention_activation": "softmax", "attention_sink": "zero", "attention_gate": "headwise"},
        3: {"attention_activation": "softplus", "query_projection": "nonlinear"},
    },
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """A function from switches to the folder of a trained model."""
    folders = {}

    def get(switches):
        key = str(switches)
        if key not in folders:
            folders[key] = trained_model(tmp_path_factory.mktemp("model"), **switches)
        return folders[key]

    return get


def run(session: onnxruntime.InferenceSession, inputs: dict) -> dict:
    """Runs a program. Names that are inputs and outputs at once carry a prefix."""
    feed = {value.name: inputs[value.name.removeprefix("input.")] for value in session.get_inputs()}
    names = [value.name.removeprefix("output.") for value in session.get_outputs()]
    return dict(zip(names, session.run(None, feed)))


def open_session(model) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])


def left_padded(prompts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    longest = max(map(len, prompts))
    pad = torch.nn.functional.pad
    ids = torch.stack([pad(prompt, (longest - len(prompt), 0)) for prompt in prompts])
    mask = torch.stack([pad(torch.ones_like(prompt), (longest - len(prompt), 0)) for prompt in prompts])
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


@pytest.mark.parametrize(
    "switches",
    [MIXED, pytest.param(OTHERS, marks=pytest.mark.slow)],
    ids=["mixed", "others"],
)
def test_prompt_and_decoding(switches, folder_of, tmp_path):
    """Logits of a padded batch, and the tokens of a greedy loop over the exported decode step."""
    folder = folder_of(switches)
    model, tokenizer = NLQForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    words = tokenizer("one two three four five six seven eight nine ten", return_tensors="pt").input_ids[0]
    sample = left_padded([words[:6], words[2:6]])
    exported = OnnxExporter().export_for_generation(
        model, {name: sample[name] for name in ("input_ids", "attention_mask")}, OnnxConfig(dynamic=True)
    )
    exported.save_pretrained(tmp_path)
    prefill, decode = (open_session(str(tmp_path / f"{name}.onnx")) for name in ("prefill", "decode"))

    prompts = [words, words[3:], words[1:8]]
    inputs = left_padded(prompts)
    outputs = run(prefill, {name: value.numpy() for name, value in inputs.items()})
    with torch.no_grad():
        expected = model(**inputs).logits
    kept = inputs["attention_mask"].bool()
    assert (torch.from_numpy(outputs["logits"]) - expected)[kept].abs().max() < LIMIT

    found, texts, errors = [], inputs["input_ids"], []
    mask, steps = inputs["attention_mask"], 8
    for _ in range(steps):
        new = torch.from_numpy(outputs["logits"])[:, -1:].argmax(-1)
        found.append(new)
        texts, mask = torch.cat([texts, new], dim=1), torch.cat([mask, torch.ones_like(new)], dim=1)
        step = {"input_ids": new, "attention_mask": mask, "position_ids": mask.sum(-1, keepdim=True) - 1}
        outputs = run(decode, {**outputs, **{name: value.numpy() for name, value in step.items()}})
        with torch.no_grad():
            expected = model(texts, attention_mask=mask, use_cache=False).logits[:, -1]
        errors.append((torch.from_numpy(outputs["logits"])[:, -1] - expected).abs().max())
    assert max(errors) < LIMIT
    assert torch.cat(found, dim=1).tolist() == [greedy(model, prompt, steps) for prompt in prompts]


def padded(rows: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 300, (rows, length))
    mask = (torch.arange(length) >= torch.arange(rows)[:, None] + 1).long()
    return {"input_ids": ids, "attention_mask": mask}


def packed(*documents: int) -> dict[str, torch.Tensor]:
    positions = torch.cat([torch.arange(length) for length in documents]).expand(2, -1).contiguous()
    return {"input_ids": torch.randint(1, 300, positions.shape), "position_ids": positions}


@pytest.mark.parametrize(
    "sample, others",
    [(padded(2, 5), [padded(3, 9), padded(1, 40)]), (packed(3, 4), [packed(2, 5, 3), packed(12)])],
    ids=["padded", "packed"],
)
def test_pytorch_exporter(sample, others, folder_of):
    """`torch.onnx.export` without Transformers' patches of PyTorch."""
    model = NLQForCausalLM.from_pretrained(folder_of(MIXED))
    model.config.use_cache = False
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", max=model.config.max_position_embeddings)
    program = torch.onnx.export(
        model,
        (),
        kwargs=sample,
        dynamic_shapes={name: {0: batch, 1: length} for name in sample},
        input_names=list(sample),
        output_names=["logits"],
        dynamo=True,
    )
    session = open_session(program.model_proto.SerializeToString())
    for inputs in others:
        logits = torch.from_numpy(run(session, {name: value.numpy() for name, value in inputs.items()})["logits"])
        assert logits.isfinite().all()  # padded tokens included
        with torch.no_grad():
            expected = model(**inputs).logits
        kept = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
        assert (logits - expected)[kept].abs().max() < LIMIT


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
outputs = prefill(input_ids=ids, position_ids=positions, past_key_values=DynamicCache(config=model.config))
found = []
for _ in range(8):
    new = outputs.logits[:, -1:].argmax(-1)
    found.append(new.item())
    cache = outputs.past_key_values
    positions = torch.tensor([[cache.get_seq_length()]])
    outputs = decode(input_ids=new, position_ids=positions, past_key_values=cache)
print(found)
"""


def test_remote_code(trained):
    """Transformers' runner, for linear attention: no layer has keys, whose length would tell how many tokens are cached."""
    folder = trained("linear_attention", "nonlinear")
    model, tokenizer = NLQForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("one two three", return_tensors="pt").input_ids[0]
    done = run_script(REMOTE, folder, package=False)
    assert done.stdout.splitlines()[-1] == str(greedy(model, prompt, 8)), done.stdout
