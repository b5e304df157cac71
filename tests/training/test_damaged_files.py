"""Files from elsewhere that are damaged, or made to cost gigabytes: an error in one line, at once, or the same result."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from support.corpora import write_documents
from support.forked_commands import forking
from support.gguf_cases import make_tokenizer, write_gguf
from transformers import LlamaConfig, LlamaForCausalLM

from modeling_nlq import NLQConfig, NLQForCausalLM


SIZES = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
GENERATE = ["generate", "{}", "the ", "--max_new_tokens", "2", "--temperature", "0"]
# The file that is damaged, and the command that reads its folder
KINDS = {
    "configuration": ("nlq/config.json", GENERATE),
    "checkpoint": ("llama/model.safetensors", GENERATE),
    "tokenizer": ("llama/tokenizer.json", GENERATE),
    "gguf": ("gguf/model.gguf", ["convert", "{}/model.gguf", "target"]),
    "yaml": ("yaml/recipe.yaml", ["train", "{}/recipe.yaml", "--output_dir", "run", "--max_steps", "1"]),
}
# Values for which the parsers of numbers, texts and lists have no use
VALUES = [b"null", b"-1", b"0", b"1e999", b"NaN", b"[]", b"{}", b'""', b"true", b"99999999999", b'"' + b"x" * 100_000 + b'"']
VALUES += [b"[" * 5000, b"\x00", b"\xff\xfe", "\u202e\x1b[2J".encode()]


@pytest.fixture(scope="module")
def command():
    with forking() as run:
        yield run


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A folder of each kind, all of which can be read."""
    root, tokenizer = tmp_path_factory.mktemp("whole"), make_tokenizer()
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=64))
    for name, model in {"nlq": NLQForCausalLM(NLQConfig(**SIZES, max_position_embeddings=64)), "llama": llama}.items():
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    (root / "gguf").mkdir()
    write_gguf(root / "gguf" / "model.gguf", llama, tokenizer=tokenizer)
    write_documents(root / "yaml" / "text.jsonl", [f"the quick brown fox {index}" for index in range(400)])
    recipe = {"model": str(root / "nlq"), "tokenizer": str(root / "nlq"), "dataset": str(root / "yaml" / "text.jsonl")}
    recipe |= {"block_size": 16, "explore": False, "switches": {"attention_activation": "softmax"}}
    recipe["training"] = {"max_steps": 1, "per_device_train_batch_size": 2, "learning_rate": 1e-3, "report_to": "none"}
    (root / "yaml" / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return root


def damage(content: bytes, chance: random.Random) -> bytes:
    """Content with one to three damages: cut, zeroed, repeated, changed, or with a value that does not belong there."""
    for _ in range(chance.randint(1, 3)):
        # Headers are where numbers stand that are believed
        first = chance.randrange(min(len(content), chance.choice([64, 2048, len(content)])) or 1)
        last = first + chance.choice([1, 4, 64, 1024])
        kind = chance.choice(["cut", "zero", "repeat", "change", "remove", "value", "value", "digits"])
        if kind == "cut":
            content = content[:first]
        elif kind == "zero":
            content = content[:first] + bytes(min(last, len(content)) - first) + content[last:]
        elif kind == "repeat":
            content = content[:last] + content[first:last] * chance.choice([1, 50]) + content[last:]
        elif kind == "change":
            content = content[:first] + chance.randbytes(last - first) + content[last:]
        elif kind == "remove":
            content = content[:first] + content[last:]
        elif kind == "value":
            start = content.find(b":", first) + 1 or first
            ends = [end for mark in (b",", b"\n", b"}") if (end := content.find(mark, start)) >= 0]
            content = content[:start] + chance.choice(VALUES) + content[min(ends, default=start) :]
        else:
            place = next((index for index in range(first, len(content)) if chr(content[index]) in "123456789"), first)
            content = content[:place] + b"9" * chance.choice([2, 4, 7, 20]) + content[place:]
    return content


def check(outcome) -> None:
    lines = outcome.printed.splitlines()
    errors = [line for line in lines if line.startswith("nlq: error: ")]
    assert outcome.status in (0, 1) and "Traceback" not in outcome.printed, outcome
    assert len(errors) == outcome.status and all(len(line) < 2100 for line in errors), outcome
    assert outcome.memory < 2**31, outcome


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(2, 40, 2))])
def test_damaged(kind, first, whole, command, tmp_path):
    """40 files of each kind, 2 of them in the quick run."""
    name, arguments = KINDS[kind]
    for number in range(first, first + 2):
        folder = shutil.copytree((whole / name).parent, tmp_path / str(number))
        file = folder / Path(name).name
        file.write_bytes(damage(file.read_bytes(), random.Random(f"{kind} {number}")))
        check(command([argument.format(folder) for argument in arguments]))


@pytest.mark.parametrize("kind", KINDS)
def test_whole(kind, whole, command):
    """Else the damaged ones would be refused for another reason."""
    outcome = command([argument.format((whole / KINDS[kind][0]).parent) for argument in KINDS[kind][1]])
    assert outcome.status == 0, outcome.printed


def change_json(file: Path, **fields) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def with_layers(folder: Path) -> None:
    change_json(folder / "config.json", num_hidden_layers=10**5)


def with_other_layers(model_type: str, **fields):
    return lambda folder: (folder / "config.json").write_text(json.dumps({"model_type": model_type, **fields}))


def with_yaml(text: str):
    return lambda folder: (folder / "recipe.yaml").write_text(text)


def aliases(field: str) -> str:
    """A billion values in a few hundred bytes."""
    value = "&x0 [lol]"
    for level in range(1, 10):
        value = f"&x{level} [{value}{f', *x{level - 1}' * 9}]"
    return f"model: tiny-linear\n{field}: {value}\n"


def with_regex(folder: Path) -> None:
    normalizer = {"type": "Replace", "pattern": {"Regex": "(x+x+)+y"}, "content": ""}
    change_json(folder / "tokenizer.json", normalizer=normalizer)


TRAIN, PARAMS = KINDS["yaml"][1], ["params", "{}"]
TOO_MANY, LAYERS = "more than 20,000 values", "names 100,000 layers, and at most 1,000 are built"
# By name: the folder, its change, the command, and what the error says
EXPENSIVE = {
    "switches": ("yaml", with_yaml(aliases("switches")), TRAIN, TOO_MANY),
    "alias_in_itself": ("yaml", with_yaml("lora: &x [*x]"), TRAIN, "an alias stands inside of what it stands for"),
    "levels": ("yaml", with_yaml("lora: " + "[" * 10**5), TRAIN, "more than 50 levels"),
    "long_yaml": ("yaml", with_yaml(f"lora: [{'1, ' * 10**6}]"), TRAIN, "more than 1,048,576 bytes of YAML"),
    "long_value": ("yaml", with_yaml(f"model: {'x' * 10**6}"), TRAIN, " [...] "),
    "layers_generate": ("llama", with_layers, GENERATE, LAYERS),
    "layers_by_another_name": ("llama", with_other_layers("bart", decoder_layers=10**5), PARAMS, LAYERS),
    "layers_inside": ("llama", with_other_layers("gemma3", text_config={"num_hidden_layers": 10**5}), PARAMS, LAYERS),
    "per_layer_config": (
        "nlq",
        lambda at: change_json(at / "config.json", per_layer_config={layer: {} for layer in range(10**6)}),
        PARAMS,
        "bytes, and at most 4,194,304 are read",
    ),
    "layers_gguf": (
        "gguf",
        lambda at: write_gguf(at / "model.gguf", LlamaForCausalLM(LlamaConfig(**SIZES)), fields={"llama.block_count": 10**6}),
        KINDS["gguf"][1],
        "names 1,000,000 layers",
    ),
    "beams": (
        "llama",
        lambda at: change_json(at / "generation_config.json", num_beams=10**7),
        GENERATE,
        "num_beams=10000000 must be between 1 and 64",
    ),
    "document": (
        "llama",
        lambda at: write_documents(at / "text.jsonl", ["import os\n" * 4_000_000]),
        ["evaluate", "{}", "--dataset", "{}/text.jsonl"],
        "holds a document of 40,000,000 characters",
    ),
    "regex": ("llama", with_regex, ["generate", "{}", "x" * 60], "the tokenizer cannot read this text: Onig"),
}


@pytest.mark.parametrize("name", EXPENSIVE)
def test_what_would_take_minutes_or_gigabytes(name, whole, command, tmp_path):
    kind, change, arguments, message = EXPENSIVE[name]
    folder = shutil.copytree(whole / kind, tmp_path / kind)
    change(folder)
    outcome = command([argument.format(folder) for argument in arguments])
    check(outcome)
    assert outcome.status == 1 and message in outcome.printed.splitlines()[-1], outcome
    assert len(outcome.printed.splitlines()) < 20, outcome  # with progress bars


@pytest.mark.parametrize("what", ["model", "tokenizer"])
@pytest.mark.parametrize("arguments", [GENERATE, ["evaluate", "{}"], ["explore", "{}", "--text", "the fox"], TRAIN])
def test_code_beside_a_model(arguments, what, whole, command, tmp_path):
    """Never by a question on the terminal, and where there is an option, only with it."""
    folder = shutil.copytree(whole / "llama", tmp_path / "llama")
    if what == "model":
        change_json(
            folder / "config.json", model_type="evil", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}
        )
    else:
        change_json(folder / "tokenizer_config.json", tokenizer_class="T", auto_map={"AutoTokenizer": ["evil.T", None]})
    (folder / "evil.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast\n"
        "class C(LlamaConfig):\n    model_type = 'evil'\n"
        "class M(LlamaForCausalLM):\n    config_class = C\n"
        "class T(PreTrainedTokenizerFast):\n    pass\n"
        f"open({str(tmp_path / 'planted')!r}, 'w').close()\n"
    )
    if arguments is TRAIN:
        recipe = yaml.safe_load((whole / "yaml" / "recipe.yaml").read_text())
        recipe |= {"tokenizer": str(folder), "model": str(folder if what == "model" else whole / "nlq"), "switches": {}}
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    arguments = [argument.format(folder) for argument in arguments]
    outcome = command(arguments)
    check(outcome)
    assert outcome.status == 1 and "y/N" not in outcome.printed and not (tmp_path / "planted").exists(), outcome
    if arguments[0] == "generate":
        assert "--trust-remote-code" in outcome.printed
        outcome = command([*arguments, "--trust-remote-code"])
        assert outcome.status == 0 and (tmp_path / "planted").exists(), outcome
