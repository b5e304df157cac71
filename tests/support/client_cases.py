"""Shared parts of the tests of other people's programs: tiny trained models, and processes with and without this
package.
"""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, LlamaConfig, PreTrainedTokenizerFast

from modeling_nlq import NLQConfig, NLQForCausalLM


# Every activation that a client has to treat in its own way, each with another query
CASES = (("softmax", "upcycled"), ("sigmoid", "nonlinear"), ("squared", "linear"), ("linear_attention", "nonlinear"))
SIZES = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 4, "intermediate_size": 64, "max_position_embeddings": 128}
TEXT = "one two three four five six seven eight nine ten eleven twelve " * 40
# Runs before a script: as if this package were not installed
WITHOUT_PACKAGE = "import sys; sys.modules['modeling_nlq'] = None\n"
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of `TEXT` with a chat template."""
    end, tokenizer = "<|endoftext|>", Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    options = {"vocab_size": 300, "special_tokens": [end], "show_progress": False}
    trainer = trainers.BpeTrainer(**options, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([TEXT], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, bos_token=end, pad_token=end)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def trained_model(folder: Path, steps: int = 60, **switches) -> Path:
    """Trains a tiny model on `TEXT` until its tokens differ clearly, and saves it with its tokenizer and code."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    end = tokenizer.eos_token_id
    config = NLQConfig(**{**SIZES, **switches}, pad_token_id=end, bos_token_id=end, eos_token_id=end)
    model = NLQForCausalLM(config)
    ids = torch.tensor(tokenizer(TEXT).input_ids)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        starts = torch.randint(len(ids) - 48, (8,)).tolist()
        batch = torch.stack([ids[start : start + 48] for start in starts])
        model(batch, labels=batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def small_model(folder: Path, config_class: type[GPT2Config | LlamaConfig]) -> Path:
    """A model of another family with a tokenizer, untrained."""
    tokenizer = make_tokenizer()
    end = tokenizer.eos_token_id
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256}
    own = {"num_key_value_heads": 2, "intermediate_size": 48} if config_class is LlamaConfig else {}
    config = config_class(vocab_size=300, **sizes, **own, bos_token_id=end, eos_token_id=end)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def numbered_texts(path: Path) -> Path:
    """Twenty documents as a JSONL file."""
    path.write_text("".join(json.dumps({"text": f"{n} {TEXT}"}) + "\n" for n in range(20)))
    return path


IDS = torch.tensor(make_tokenizer()(TEXT).input_ids[:24]).view(2, 12)


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, **options)


@torch.no_grad()
def logits(model, ids=IDS):
    return model(input_ids=ids).logits


def fit(model, ids=IDS, steps=4, learns=True):
    """Trains what is not frozen on a text that the model does not know, and checks that its loss falls."""
    optimizer = torch.optim.AdamW((parameter for parameter in model.parameters() if parameter.requires_grad), lr=1e-2)
    losses = []
    model.train()
    for _ in range(steps):
        loss = model(input_ids=ids.flip(1), labels=ids.flip(1)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    assert losses[-1] < losses[0] or not learns


def continuation(folder, text: str, new_tokens: int) -> str:
    """What a saved model writes after a text."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer.decode(greedy(load(folder), tokenizer(text, return_tensors="pt").input_ids[0], new_tokens))


def greedy(model, prompt: torch.Tensor, new_tokens: int) -> list[int]:
    """The reference of every generating client: the most likely tokens after `(length,)`, without a cache."""
    ids = prompt[None]
    with torch.no_grad():
        for _ in range(new_tokens):
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(prompt) :].tolist()


def run_script(script: str, *arguments, package: bool = True, shared: Path | None = None) -> str:
    """Runs a script, with this package or where it cannot be imported, and returns what it prints.

    `arguments` are `sys.argv[1:]`. Two processes of `torch.distributed` run it from a file in a folder `shared`.
    """
    source = textwrap.dedent(script)
    if not package:
        source = WITHOUT_PACKAGE + source
    command = ["-c", source]
    if shared is not None:
        (shared / "script.py").write_text(source)
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(shared / "script.py")]
    command = [sys.executable, *command, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout
