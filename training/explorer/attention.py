"""Measures the attention of a model on one text: the weights and numbers of each head."""

from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import repeat_kv

from modeling_nlq.attention_nlq import scores_and_weights
from modeling_nlq.linear_nlq import linear_attention
from modeling_nlq.modeling_nlq import NLQAttention
from modeling_nlq.parts_base_nlq import AttentionCall

from ..observe import Positions, observe_calls, visibility_of
from .measures import (
    ablations,
    effective_ranks,
    entropies,
    induction_scores,
    own_value_cosines,
    previous_token_scores,
    shares,
)


# FLOPs for removing all heads, half a minute on two cores. The text is cut to fit them, but not below `FEWEST_ABLATED`
# tokens; if these cost more than `MOST_ABLATION`, heads are not removed
ABLATION_BUDGET = 4e12
FEWEST_ABLATED = 64
MOST_ABLATION = 4e13

# Names and descriptions of the numbers. Those in `ROWS` are means over the queries that see more than one key
ROWS = {
    "entropy": "Entropy of the shares |w| / Σ|w| of a query's weights in nats, mean over queries. It is 0 if one key "
    "gets all.",
    "first_token": "Share of the first token, mean over queries. A large share is called an attention sink.",
    "row_sum": "Sum of the weights of a query, with signs, mean over queries. It is 1 for softmax.",
    "own_value_cosine": "cos(y, v) between a head's output and the token's own value, mean over queries.",
}
HEADS = {
    "effective_rank": "Effective rank of the head's queries, from 1 to the width of a head (Roy and Vetterli 2007).",
    "largest_score": "Largest score before the activation.",
    "previous_token": "Share of the previous token, on random tokens, repeated once (Olsson et al. 2022).",
    "induction": "Share of the token that followed the previous occurrence of the current token, on random tokens, "
    "repeated once (Olsson et al. 2022).",
    "ablation": "What removing the head adds to the loss, in nats per token. Orange heads help, blue ones harm.",
}
_NO_WEIGHTS = "linear attention has no weight for a pair of tokens"
_PAIRS = "differential attention subtracts two maps, and each of them has its own value"
_TWO_GROUPS = "a head reads the values of two groups, and a token has no value of its own there"
_NO_OWN_KEY = "cross-attention sees the tokens of the source, and no token of its own text"


@dataclass
class Layer:
    """The weights, `(heads, query, key)`, and the numbers, `(heads,)`, of one attention layer.

    `heads` counts maps: differential attention has one for two heads. `missing` says why a number is not there.
    """

    activation: str
    heads: int
    weights: torch.Tensor | None = None
    numbers: dict[str, torch.Tensor] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    name: str = ""
    is_cross: bool = False

    def add_rows(self, has_choice: torch.Tensor, **rows: torch.Tensor) -> None:
        """Adds means of `(heads, query)` over the queries of a mask."""
        self.numbers |= {name: values[:, has_choice].nanmean(dim=-1) for name, values in rows.items()}

    def add_weights(self, weights: torch.Tensor, has_choice: torch.Tensor) -> None:
        self.weights = weights
        first = shares(weights)[..., 0]
        self.add_rows(has_choice, entropy=entropies(weights), first_token=first, row_sum=weights.sum(dim=-1))


def measure_attention(
    model: PreTrainedModel, input_ids: torch.Tensor, random_ids: torch.Tensor, ablated_tokens: int = 0
) -> list[Layer]:
    """Measures the attention of each layer on a text, `(1, length)`, and on `repeated_tokens`.

    Heads are removed on the first `ablated_tokens`, if these are at least 2.
    """
    layers = _measure_layers(model, input_ids)
    period = random_ids.shape[1] // 2
    for layer, on_random in zip(layers, _measure_layers(model, random_ids) if period > 1 else ()):
        if on_random.weights is not None and not layer.is_cross:
            layer.numbers["previous_token"] = previous_token_scores(on_random.weights)
            layer.numbers["induction"] = induction_scores(on_random.weights, period)
    if ablated_tokens > 1:
        costs = ablations(model, input_ids[:, :ablated_tokens], [layer.heads for layer in layers])
        for layer, cost in zip(layers, costs):
            layer.numbers["ablation"] = cost
    return layers


def tokens_to_ablate(model: PreTrainedModel, length: int) -> int:
    """Returns on how many tokens heads are removed; 0 if the model is too large."""
    heads = model.config.num_hidden_layers * model.config.num_attention_heads
    cost = 2.0 * model.num_parameters() * heads  # per token
    if not model.config.is_causal:
        cost *= length  # an encoder reads the text once for each masked token
    if cost * min(length, FEWEST_ABLATED) > MOST_ABLATION:
        return 0
    return min(length, max(FEWEST_ABLATED, int(ABLATION_BUDGET / cost)))


def _measure_layers(model: PreTrainedModel, input_ids: torch.Tensor) -> list[Layer]:
    layers: list[Layer] = []

    def receive(layer: NLQAttention, call: AttentionCall, positions: Positions) -> None:
        measure = _measure_linear if layer.activation.kind == "linear" else _measure_weights
        measured = measure(layer, call, positions)
        measured.is_cross = call.source is not None
        measured.name = f"{layer.layer_idx}{' cross' if measured.is_cross else ''}"
        if measured.is_cross:
            measured.missing |= dict.fromkeys(("own_value_cosine", "previous_token", "induction"), _NO_OWN_KEY)
        for part in layer.parts.values():
            for name, values in part("measure", call).items():
                if values.shape == (measured.heads,):
                    measured.numbers[name] = values.cpu()
                elif values.shape == (layer.num_heads,):
                    measured.missing[name] = _PAIRS
                else:
                    shape = tuple(values.shape)
                    raise ValueError(f"attention part {part.name!r}: {name!r} has {shape=}, not ({measured.heads},)")
        layers.append(measured)

    observe_calls(model, receive, input_ids, logits_to_keep=1)
    return layers


def _measure_weights(layer: NLQAttention, call: AttentionCall, positions: Positions) -> Layer:
    query, key, value, bias = layer.prepare(call, positions)
    visibility = visibility_of(layer, query, key)
    visible, counts = visibility.dense(), visibility.visible_count
    key = repeat_kv(key, layer.num_key_value_groups)
    query, columns = query[..., : key.shape[-1]], query[..., key.shape[-1] :]
    inputs = (query, columns, key, visible, counts[:, None])
    scores, weights = scores_and_weights(layer, *inputs, layer.scaling, bias, call)
    for part in layer.parts_with("change_returned_weights"):
        weights = part("change_returned_weights", call, weights)
    weights = weights[0].cpu()
    has_choice = (counts > 1)[0].cpu()
    measured = Layer(layer.activation.name, len(weights))
    measured.add_weights(weights, has_choice)
    if len(weights) == query.shape[1]:
        measured.numbers["effective_rank"] = effective_ranks(query[0].cpu())
        scores = scores[0].masked_fill(~visible[0], -torch.inf)
        measured.numbers["largest_score"] = scores.flatten(1).amax(dim=-1).cpu()
    else:
        measured.missing |= dict.fromkeys(("effective_rank", "largest_score"), _PAIRS)
    if call.values is not None and value.shape == call.values.shape:
        values = value[0].cpu().to(weights.dtype)
        values = values.repeat_interleave(len(weights) // len(values), dim=0)
        measured.add_rows(has_choice, own_value_cosine=own_value_cosines(weights @ values, values))
    else:
        measured.missing["own_value_cosine"] = _TWO_GROUPS
    return measured


def _measure_linear(layer: NLQAttention, call: AttentionCall, positions: Positions) -> Layer:
    query, key, value = layer.project(call)
    need_weights = ("weights", "entropy", "first_token", "row_sum", "largest_score", "previous_token", "induction")
    measured = Layer(layer.activation.name, query.shape[1], missing=dict.fromkeys(need_weights, _NO_WEIGHTS))
    measured.numbers["effective_rank"] = effective_ranks(query[0].cpu())
    if call.source is not None:
        return measured
    options = {"scaling": layer.scaling, "is_causal": layer.is_causal, **layer.rates(call.hidden_states)}
    outputs, _ = linear_attention(query, key, value, None, position_embeddings=positions, form="parallel", **options)
    values = repeat_kv(value, layer.num_key_value_groups)[0].cpu()
    later = torch.arange(values.shape[1]) >= int(layer.is_causal)  # the first token of a decoder sees only itself
    measured.add_rows(later, own_value_cosine=own_value_cosines(outputs[0].transpose(0, 1).cpu(), values))
    return measured
