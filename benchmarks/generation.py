"""Speed of greedy `generate`, beside the GPT-2 and the Llama of Transformers in the same shape.

    python benchmarks/generation.py                                # decoding and a long context, on the CPU in float32
    python benchmarks/generation.py --settings static              # with a static cache, compiled in some minutes
    python benchmarks/generation.py --device cuda --dtype bfloat16 --preset gpt3-small --settings decode static

The candidates take turns in one process. A ratio is the median of the rounds' ratios to the reference's speed, with
its quartiles. A streamer reads the clock when a token arrives: the first one tells the time of the prompt, the others
the time of a token. Before anything is timed, each candidate's tokens with a cache must be the best ones without it,
up to the rounding of the dtype.
"""

import argparse
import statistics
import time
from dataclasses import dataclass

import torch
from measure import attempt, describe, quartiles
from transformers import (
    CompileConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.generation import BaseStreamer
from transformers.utils import logging

from modeling_nlq import NLQConfig, NLQForCausalLM


SHAPES = {
    "small": {"vocab_size": 2048, "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4},
    "gpt3-small": {"vocab_size": 50304, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12},
}
LONGEST = 8192
REFERENCES = ("gpt2", "llama")
CANDIDATES = {
    "linear": {"query_projection": "linear"},
    "nonlinear": {"query_projection": "nonlinear"},
    "sigmoid": {"query_projection": "linear", "attention_activation": "sigmoid"},
    "relu": {"query_projection": "linear", "attention_activation": "relu"},
    "squared": {"query_projection": "linear", "attention_activation": "squared"},
    "linear_attention": {"query_projection": "linear", "attention_activation": "linear_attention"},
}


@dataclass(frozen=True)
class Setting:
    """What is generated.

    Attributes:
        batch: number of texts.
        prompt, new: tokens of a text before and after.
        reference: the candidate whose speed is 1.
        shows_prompt: whether the table has the time of the prompt.
        is_compiled: whether the cache is static and the model compiled.
    """

    batch: int
    prompt: int
    new: int
    reference: str
    shows_prompt: bool = False
    is_compiled: bool = False


SETTINGS = {
    "decode": [Setting(1, 64, 128, "gpt2"), Setting(8, 64, 128, "gpt2")],
    "context": [Setting(1, 4096, 32, "linear", shows_prompt=True)],
    "static": [Setting(batch, 64, 128, "llama", is_compiled=True) for batch in (1, 8)],
}


class Clock(BaseStreamer):
    """Notes when the prompt and each token arrive."""

    def __init__(self):
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Notes the time of some tokens, which lie on the CPU, so they are finished."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Does nothing."""


def make_model(name: str, arguments: argparse.Namespace) -> PreTrainedModel:
    """Makes a random model in evaluation mode, without an end-of-text token."""
    torch.manual_seed(0)
    shape = SHAPES[arguments.preset]
    size = shape["hidden_size"]
    ends = {"bos_token_id": None, "eos_token_id": None}
    if name == "gpt2":
        config = GPT2Config(
            vocab_size=shape["vocab_size"],
            n_embd=size,
            n_layer=shape["num_hidden_layers"],
            n_head=shape["num_attention_heads"],
            n_positions=LONGEST,
            **ends,
        )
        model = GPT2LMHeadModel(config)
    elif name == "llama":
        config = LlamaConfig(**shape, intermediate_size=4 * size, max_position_embeddings=LONGEST, **ends)
        model = LlamaForCausalLM(config)
    else:
        model = NLQForCausalLM(NLQConfig(**shape, max_position_embeddings=LONGEST, **CANDIDATES[name]))
    return model.to(arguments.device, getattr(torch, arguments.dtype)).eval()


def generate(model: PreTrainedModel, tokens: torch.Tensor, setting: Setting, new: int, **options) -> torch.Tensor:
    """Returns the prompt and `new` tokens after it."""
    if setting.is_compiled:
        # Launching a model's kernels one by one takes a GPU longer than the kernels themselves; CUDA graphs replay
        # them
        mode = "reduce-overhead" if tokens.is_cuda else "default"
        compiled = CompileConfig(fullgraph=True, mode=mode)
        compiled._compile_all_devices = True  # Transformers compiles on GPUs only, unless it is told to
        options |= {"cache_implementation": "static", "compile_config": compiled}
    return model.generate(tokens, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0, **options)


def gate(model: PreTrainedModel, tokens: torch.Tensor, setting: Setting) -> None:
    """Raises `ValueError` if a token chosen with a cache is not the best one without a cache, up to rounding."""
    new = 8
    text = generate(model, tokens[:, :64], setting, new)
    with torch.no_grad():
        logits = model(text[:, :-1], use_cache=False).logits[:, -new:].float()
    best, chosen = logits.amax(-1), logits.gather(-1, text[:, -new:, None]).squeeze(-1)
    if not (best - chosen <= 16 * torch.finfo(model.dtype).eps * best.abs()).all():
        raise ValueError("a cache changes the tokens")


def turn(model: PreTrainedModel, tokens: torch.Tensor, setting: Setting) -> tuple[float, float]:
    """Returns the seconds of the prompt with its first token, and of each token after that."""
    clock = Clock()
    start = time.perf_counter()
    generate(model, tokens, setting, setting.new, streamer=clock)
    first, last = clock.times[1], clock.times[-1]  # the first entry is the prompt itself
    return first - start, (last - first) / (setting.new - 1)


def compare(setting: Setting, names: list[str], arguments: argparse.Namespace) -> None:
    """Prints the table of one setting."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(
        1, SHAPES[arguments.preset]["vocab_size"], (setting.batch, setting.prompt), generator=generator
    ).to(arguments.device)
    names = list(dict.fromkeys([setting.reference, *names]))
    torch._dynamo.config.recompile_limit = 8 * len(names)  # the models of one class share their code, and so a limit
    times: dict[str, list[tuple[float, float]]] = {}
    models, failures = {}, {}
    for name in names:
        models[name] = make_model(name, arguments)

        def prepare(model=models[name]):
            gate(model, tokens, setting)
            turn(model, tokens, setting)

        if (reason := attempt(name, prepare)) is not None:
            failures[name] = reason
        times[name] = []
    if setting.reference in failures:
        raise SystemExit(f"{setting.reference}, the reference, failed: {failures[setting.reference]}")
    new_graphs = dict.fromkeys(names, 0)
    for _ in range(arguments.rounds):
        for name in names:
            if name not in failures:
                graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
                times[name].append(turn(models[name], tokens, setting))
                new_graphs[name] += torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs
    compiled = ", compiled, static cache" if setting.is_compiled else ""
    print(f"\nbatch {setting.batch}, prompt of {setting.prompt:,}, {setting.new} new tokens{compiled}\n")
    header = ["model", "ms per token", f"speed, x {setting.reference}", "quartiles"]
    header += ["ms of the prompt", f"time, x {setting.reference}"] if setting.shows_prompt else []
    header += ["graphs compiled while timing"] if setting.is_compiled else []
    print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for name in names:
        if name in failures:
            print(f"| {name} | {failures[name]} |{' |' * (len(header) - 2)}")
            continue
        prompts, steps = zip(*times[name])
        their_prompts, their_steps = zip(*times[setting.reference])
        low, middle, high = quartiles(their_steps, steps)
        cells = [name, f"{1000 * statistics.median(steps):.2f}", f"{middle:.2f}", f"{low:.2f} to {high:.2f}"]
        if setting.shows_prompt:
            cells += [f"{1000 * statistics.median(prompts):.0f}", f"{quartiles(prompts, their_prompts)[1]:.2f}"]
        if setting.is_compiled:
            cells.append(str(new_graphs[name]))
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    names = [*REFERENCES, *CANDIDATES]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=["decode", "context"])
    parser.add_argument("--candidates", nargs="+", choices=names, default=names)
    parser.add_argument("--preset", choices=SHAPES, default="small")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        if not torch.cuda.is_available():
            parser.error("--device cuda: PyTorch sees no CUDA device here")
        print(describe("cuda"))
    torch.set_num_threads(arguments.threads)
    logging.set_verbosity_error()
    for name in arguments.settings:
        for setting in SETTINGS[name]:
            compare(setting, arguments.candidates, arguments)


if __name__ == "__main__":
    main()
