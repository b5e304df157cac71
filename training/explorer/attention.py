"""What the attention layers of a model do with one text: weights, rows and numbers of every head."""

from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import repeat_kv

from modeling_nlq.attention_nlq import scores_and_weights
from modeling_nlq.linear_nlq import linear_attention
from modeling_nlq.parts_base_nlq import AttentionCall
from modeling_nlq.projections_nlq import NLQAttentionProjections

from ..observe import observe_calls, visibility_of
from .measures import (
    ablations,
    effective_ranks,
    entropies,
    induction_scores,
    largest_scores,
    own_value_cosines,
    previous_token_scores,
    shares,
)


# Floating-point operations that removing all heads may take, some half a minute on two cores. A text is cut for it to
# as few tokens as `FEWEST_ABLATED`; a model for which that takes longer than `MOST_ABLATION` is left alone
ABLATION_BUDGET = 4e12
FEWEST_ABLATED = 64
MOST_ABLATION = 4e13

# What is measured of rows, and of heads: a name, and what a page says of it. Rows are averaged over the queries that
# see more than one key
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
    "repeated "
    "once (Olsson et al. 2022).",
    "ablation": "What removing the head adds to the loss, in nats per token.",
}
_NO_WEIGHTS = "linear attention has no weight for a pair of tokens"
_PAIRS = "differential attention subtracts two maps, and each of them has its own value"
_NO_OWN_KEY = "cross-attention sees the tokens of the source, and no token of its own text"


@dataclass
class Layer:
    """What one attention layer does with a text.

    Attributes:
        heads: the number of maps. For differential attention it is that of differences.
        weights: `(heads, query, key)`, as `output_attentions=True` returns them, or `None`.
        rows: `(heads, query)` by the names in `ROWS`; NaN where a row has none.
        numbers: `(heads,)` by the names in `ROWS`, `HEADS` and of parts.
        missing: why a name is not among them.
        name, is_cross: the number of the layer, with `cross` where the keys are the tokens of the source.
    """

    activation: str
    heads: int
    weights: torch.Tensor | None = None
    rows: dict[str, torch.Tensor] = field(default_factory=dict)
    numbers: dict[str, torch.Tensor] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    name: str = ""
    is_cross: bool = False

    def add_rows(self, has_choice: torch.Tensor, **rows: torch.Tensor) -> None:
        """Adds rows, `(heads, query)` each, and their means over the queries that see several keys, booleans
        `(query,)`.
        """
        for name, values in rows.items():
            self.rows[name] = values
            self.numbers[name] = values[:, has_choice].nanmean(dim=-1)

    def add_weights(self, weights: torch.Tensor, has_choice: torch.Tensor) -> None:
        """Adds weights `(heads, query, key)`, and what follows from them alone; `has_choice` is that of `add_rows`."""
        self.weights = weights
        rows = {"entropy": entropies(weights), "first_token": shares(weights)[..., 0], "row_sum": weights.sum(dim=-1)}
        self.add_rows(has_choice, **rows)

    def add_measure(self, part: str, name: str, values: torch.Tensor, query_heads: int) -> None:
        """Adds a number that a part measures; raises `ValueError` unless there is one for each head."""
        if values.shape == (self.heads,):
            self.numbers[name] = values.cpu()
        elif values.shape == (query_heads,):
            self.missing[name] = _PAIRS
        else:
            raise ValueError(
                f"attention part {part!r}: {name!r} has the shape {tuple(values.shape)}, not ({self.heads},)"
            )


def measure_attention(
    model: PreTrainedModel, input_ids: torch.Tensor, random_ids: torch.Tensor, ablated_tokens: int = 0
) -> list[Layer]:
    """Measures the attention of each layer on a text.

    Args:
        model: an NLQ model, in evaluation mode.
        input_ids: `(1, length)`.
        random_ids: random tokens, repeated once (see `repeated_tokens`).
        ablated_tokens: remove heads on this many tokens; with fewer than 2 no head is removed.
    """
    layers, period = _see(model, input_ids), random_ids.shape[1] // 2
    for layer, again in zip(layers, _see(model, random_ids) if period > 1 else ()):
        if again.weights is not None and not layer.is_cross:
            layer.numbers["previous_token"] = previous_token_scores(again.weights)
            layer.numbers["induction"] = induction_scores(again.weights, period)
    if ablated_tokens > 1:
        costs = ablations(model, input_ids[:, :ablated_tokens], [layer.heads for layer in layers])
        for layer, cost in zip(layers, costs):
            layer.numbers["ablation"] = cost
    return layers


def tokens_to_ablate(model: PreTrainedModel, length: int) -> int:
    """Returns how many tokens of a text `ABLATION_BUDGET` allows; 0 if the model is too large."""
    heads = model.config.num_hidden_layers * model.config.num_attention_heads
    cost = 2.0 * model.num_parameters() * heads  # per token
    cost *= 1 if model.config.is_causal else length  # an encoder reads the text once for each masked token
    if cost * min(length, FEWEST_ABLATED) > MOST_ABLATION:
        return 0
    return min(length, max(FEWEST_ABLATED, int(ABLATION_BUDGET / cost)))


def _see(model: PreTrainedModel, input_ids: torch.Tensor) -> list[Layer]:
    """Measures the layers of a model, in its own calls."""
    layers: list[Layer] = []

    def receive(
        layer: NLQAttentionProjections,
        call: AttentionCall,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        see = _see_linear if layer.activation.kind == "linear" else _see_weights
        found = see(layer, call, position_embeddings)
        found.is_cross = call.source is not None
        found.name = f"{layer.layer_idx} cross" if found.is_cross else str(layer.layer_idx)
        if found.is_cross:
            found.missing |= dict.fromkeys(("own_value_cosine", "previous_token", "induction"), _NO_OWN_KEY)
        for part in layer.parts.values():
            for name, values in part("measure", call).items():
                found.add_measure(part.name, name, values, layer.num_heads)
        layers.append(found)

    observe_calls(model, receive, input_ids, logits_to_keep=1)
    return layers


def _see_weights(
    layer: NLQAttentionProjections, call: AttentionCall, position_embeddings: tuple[torch.Tensor, torch.Tensor] | None
) -> Layer:
    """Measures a layer that has weights."""
    query, key, value, bias = layer.prepare(call, position_embeddings)
    visibility = visibility_of(layer, query, key)
    visible, counts = visibility.dense(), visibility.visible_count
    key = repeat_kv(key, layer.num_key_value_groups)
    query, columns = query[..., : key.shape[-1]], query[..., key.shape[-1] :]
    inputs = (query, columns, key, visible, counts[:, None], layer.scaling, bias, call)
    scores, weights = scores_and_weights(layer, *inputs)
    for part in layer.parts_with("change_returned_weights"):
        weights = part("change_returned_weights", call, weights)
    weights = weights[0].cpu()
    found, has_choice = Layer(layer.activation.name, len(weights)), (counts > 1)[0].cpu()
    found.add_weights(weights, has_choice)
    if len(weights) == query.shape[1]:
        found.numbers["effective_rank"] = effective_ranks(query[0].cpu())
        found.numbers["largest_score"] = largest_scores(scores[0], visible[0]).cpu()
    else:
        found.missing |= dict.fromkeys(("effective_rank", "largest_score"), _PAIRS)
    if call.values is not None and value.shape == call.values.shape:
        values = value[0].cpu().to(weights.dtype)
        values = values.repeat_interleave(len(weights) // len(values), dim=0)
        found.add_rows(has_choice, own_value_cosine=own_value_cosines(weights @ values, values))
    else:
        found.missing["own_value_cosine"] = (
            "a head reads the values of two groups, and a token has no value of its own there"
        )
    return found


def _see_linear(
    layer: NLQAttentionProjections, call: AttentionCall, position_embeddings: tuple[torch.Tensor, torch.Tensor] | None
) -> Layer:
    """Measures a layer of linear attention."""
    query, key, value = layer.project(call)
    options = {"scaling": layer.scaling, "log_decay": layer.log_decay, "position_embeddings": position_embeddings}
    options["is_causal"] = layer.is_causal
    found = Layer(layer.activation.name, query.shape[1])
    found.missing = dict.fromkeys(
        ("weights", "entropy", "first_token", "row_sum", "largest_score", "previous_token", "induction"), _NO_WEIGHTS
    )
    found.numbers["effective_rank"] = effective_ranks(query[0].cpu())
    if call.source is not None:
        return found
    outputs, _ = linear_attention(query, key, value, None, **options, form="parallel")
    values = repeat_kv(value, layer.num_key_value_groups)[0].cpu()
    later = torch.arange(values.shape[1]) >= int(layer.is_causal)  # the first token of a decoder sees itself alone
    found.add_rows(later, own_value_cosine=own_value_cosines(outputs[0].transpose(0, 1).cpu(), values))
    return found
