"""Cost of each part of an attention layer, as a multiple of the same model without it.

    python benchmarks/parts.py
    python benchmarks/parts.py --parts forget_gate --rounds 5

The model has 12 million parameters. It has softmax, and for a forget gate sigmoid too. A step is forward, backward and
fused AdamW on random tokens. A token is one that greedy `generate` adds at the end of a sequence. The candidates take
turns in one process. A multiple is the median of the rounds' ratios to the model without the part, with its quartiles.
Before anything is timed, each candidate must give the logits of `eager`, and generate the same tokens with a cache and
without.
"""

import argparse
import statistics
from typing import Literal, get_args, get_origin

import torch
from generation import Setting, gate, turn
from measure import describe, quartiles, seconds
from training_step import make_step, transformers_loss
from transformers.utils import logging

from modeling_nlq import ATTENTION_PARTS, AttentionPart, NLQConfig, NLQForCausalLM


SHAPE = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "vocab_size": 4096}


def values_of(part: type[AttentionPart]) -> tuple:
    """Returns the values of a part's field that its type names."""
    kinds = (part.field_type, *get_args(part.field_type))
    literals = [value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
    return tuple(literals) or ((True,) if part.field_type is bool else ())


PARTS = {
    **{name: values for name, part in ATTENTION_PARTS.items() if (values := values_of(part))},
    "canon": ("AC", "ABCD"),
    "attention_activation": ("softpick", "stick_breaking"),
}
SIGMOID = {"attention_activation": "sigmoid"}


def candidates_of(parts: list[str]) -> dict[str, tuple[str, dict[str, str]]]:
    """Returns name -> (name of the model without the part, switches)."""
    candidates = {"softmax": ("softmax", {})}
    candidates |= {f"{part}={value}": ("softmax", {part: value}) for part in parts for value in PARTS[part]}
    if "forget_gate" in parts:
        candidates["sigmoid"] = ("sigmoid", SIGMOID)
        candidates |= {
            f"sigmoid, forget_gate={value}": ("sigmoid", {"forget_gate": value, **SIGMOID})
            for value in PARTS["forget_gate"]
        }
    return candidates


def make_model(switches: dict[str, str], length: int) -> NLQForCausalLM:
    torch.manual_seed(0)
    options = {"query_projection": "linear", "position_embedding": "rope", "max_position_embeddings": length}
    return NLQForCausalLM(NLQConfig(**SHAPE, **options, **switches, attn_implementation="nlq")).eval()


def gate_on_eager(name: str, model: NLQForCausalLM, tokens: torch.Tensor, setting: Setting) -> None:
    """Raises `SystemExit` if a model does not compute what it should."""
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits
        model.set_attn_implementation("eager")
        expected = model(tokens, use_cache=False).logits
        model.set_attn_implementation("nlq")
    if not torch.allclose(logits, expected, rtol=1e-4, atol=1e-4):
        raise SystemExit(f"correctness gate: {name}: the logits differ by {(logits - expected).abs().max():.1e}")
    gate(model, tokens[:1], setting)


def print_table(
    candidates: dict[str, tuple[str, dict]], steps: dict[str, list[float]], tokens: dict[str, list[float]]
) -> None:
    """Prints the times of the candidates, given the seconds of their rounds."""
    print("| | a step, ms | multiple (quartiles) | a token, ms | multiple (quartiles) |\n|---|---|---|---|---|")
    for name, (baseline, _) in candidates.items():
        cells = [name]
        for times in (steps, tokens):
            low, middle, high = quartiles(times[name], times[baseline])
            multiple = f"{middle:.3f} ({low:.3f} to {high:.3f})" if name != baseline else "1"
            cells += [f"{1000 * statistics.median(times[name]):.1f}", multiple]
        print(f"| {' | '.join(cells)} |")


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=1, help="sequences in a step")
    parser.add_argument("--new", type=int, default=24, help="tokens that are generated in a round")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args(words)
    arguments.device, arguments.dtype, arguments.compile = "cpu", "float32", False  # read by `make_step`
    torch.set_num_threads(arguments.threads)
    logging.set_verbosity_error()

    candidates = candidates_of(arguments.parts)
    setting = Setting(1, arguments.length - arguments.new, arguments.new, "softmax")
    tokens = torch.randint(
        SHAPE["vocab_size"], (arguments.batch, arguments.length), generator=torch.Generator().manual_seed(0)
    )
    prompt, trained, models, steps = tokens[:1, : setting.prompt], {}, {}, {}
    for name, (_, switches) in candidates.items():
        models[name], trained[name] = (make_model(switches, arguments.length) for _ in range(2))
        gate_on_eager(name, models[name], tokens, setting)
        steps[name] = make_step(trained[name], transformers_loss(trained[name]), arguments)
        steps[name](tokens)
        turn(models[name], prompt, setting)
    step_times, token_times = {name: [] for name in candidates}, {name: [] for name in candidates}
    for _ in range(arguments.rounds):
        for name, step in steps.items():
            step_times[name].append(seconds(lambda step=step: step(tokens)))
        for name, model in models.items():
            token_times[name].append(turn(model, prompt, setting)[1])
    parameters = models["softmax"].num_parameters()
    print(f"{parameters:,} parameters, {arguments.batch} x {arguments.length} tokens, float32; {describe('cpu')}\n")
    print_table(candidates, step_times, token_times)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
