"""What the attention layers of a model do with one text: weights, rows and numbers of every head."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.llama.modeling_llama import repeat_kv

from modeling_nlq.attention_nlq import scores_and_weights
from modeling_nlq.attention_parts_nlq import AttentionCall
from modeling_nlq.attention_projections_nlq import NLQAttentionProjections
from modeling_nlq.configuration_nlq import NLQConfig
from modeling_nlq.linear_nlq import linear_attention
from modeling_nlq.masking_nlq import make_visibility

from ..observing import observe_calls
from .measures import (
    ablations,
    effective_ranks,
    entropies,
    first_token_shares,
    induction_scores,
    largest_scores,
    own_value_cosines,
    previous_token_scores,
    repeated_tokens,
    row_sums,
)


# Floating-point operations that removing heads may take; a longer text is cut for it
ABLATION_BUDGET = 4e12
# Random tokens of the text for induction scores, which has them twice
INDUCTION_PERIOD = 64

# What is measured of rows, and of heads: a name, and what a page says of it. Rows are averaged over the queries that see more
# than one key
ROWS = {
    "entropy": "Entropy of the shares |w| / Σ|w| of a query's weights in nats, mean over queries. 0: one key has all.",
    "first_token": "Share of the first token, mean over queries. Large: an attention sink.",
    "row_sum": "Sum of the weights of a query, with signs, mean over queries. 1 for softmax.",
    "own_value_cosine": "cos(y, v) between a head's output and the token's own value, mean over queries.",
}
HEADS = {
    "effective_rank": "Effective rank of the head's queries, from 1 to the width of a head (Roy and Vetterli 2007).",
    "largest_score": "Largest score before the activation.",
    "previous_token": "Share of the previous token, on random tokens (Olsson et al. 2022).",
    "induction": "Share of the token after the same token's last place, on random tokens written twice (Olsson et al. 2022).",
    "ablation": "What removing the head adds to the loss, in nats per token.",
}
_NO_WEIGHTS = "linear attention computes no weight for a pair of tokens"
_PAIRS = "a map is the difference of two, each with its own"
_FROM_OUTSIDE = "not available: this model is neither an NLQ model nor one that converts to it"


@dataclass
class Layer:
    """What one attention layer does with a text.

    Attributes:
        activation: its name.
        heads: the number of maps. For differential attention it is that of differences.
        weights: `(heads, query, key)`, as `output_attentions=True` returns them, or `None`.
        rows: `(heads, query)` by the names in `ROWS`; NaN where a row has none.
        numbers: `(heads,)` by the names in `ROWS`, `HEADS` and of parts.
        missing: why a name is not among them.
    """

    activation: str
    heads: int
    weights: torch.Tensor | None = None
    rows: dict[str, torch.Tensor] = field(default_factory=dict)
    numbers: dict[str, torch.Tensor] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def add_rows(self, counts: torch.Tensor, **rows: torch.Tensor) -> None:
        """Adds rows, and their means over the queries that count."""
        for name, values in rows.items():
            self.rows[name] = values
            self.numbers[name] = values[:, counts].nanmean(dim=-1)

    def add_weights(self, weights: torch.Tensor, counts: torch.Tensor) -> None:
        self.weights = weights
        rows = {"entropy": entropies(weights), "first_token": first_token_shares(weights), "row_sum": row_sums(weights)}
        self.add_rows(counts, **rows)


def look(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    input_ids: torch.Tensor,
    ablated_tokens: int = 0,
) -> list[Layer]:
    """Measures the attention of each layer on a text, in float32 or better.

    Args:
        model: a causal language model of Transformers, in evaluation mode.
        tokenizer: its tokenizer, whose special tokens are not drawn at random.
        input_ids: `(1, length)`.
        ablated_tokens: remove heads on this many tokens; 0: on none.
    """
    is_ours = isinstance(model.config, NLQConfig)
    see: Callable = _look_inside if is_ours else _look_from_outside
    layers = see(model, input_ids)
    period = min(INDUCTION_PERIOD, _positions(model) // 2)
    random_tokens = repeated_tokens(min(len(tokenizer), model.config.vocab_size), tokenizer.all_special_ids, period)
    for layer, again in zip(layers, see(model, random_tokens)):
        if again.weights is not None:
            layer.numbers["previous_token"] = previous_token_scores(again.weights)
            layer.numbers["induction"] = induction_scores(again.weights, period)
    if not is_ours:
        return layers
    if ablated_tokens > 1:
        costs = ablations(model, input_ids[:, :ablated_tokens], [layer.heads for layer in layers])
        for layer, cost in zip(layers, costs):
            layer.numbers["ablation"] = cost
    else:
        for layer in layers:
            layer.missing["ablation"] = "the text has a single token"
    return layers


def ablated_tokens(model: PreTrainedModel, length: int) -> int:
    """How many tokens of a text `ABLATION_BUDGET` allows, at least 64 if the text has them."""
    heads = model.config.num_hidden_layers * model.config.num_attention_heads
    cost = 2.0 * model.num_parameters() * heads  # per token
    return min(length, max(64, int(ABLATION_BUDGET / cost)))


def _positions(model: PreTrainedModel) -> int:
    return getattr(model.config, "max_position_embeddings", None) or 2 * INDUCTION_PERIOD


def _look_inside(model: PreTrainedModel, input_ids: torch.Tensor) -> list[Layer]:
    """Measures the layers of an NLQ model, in its own calls."""
    layers: list[Layer] = []

    def receive(layer: NLQAttentionProjections, call: AttentionCall, position_embeddings) -> None:
        see = _see_linear if layer.activation.kind == "linear" else _see_weights
        found = see(layer, call, position_embeddings)
        for part in layer.parts.values():
            for name, values in part.measure(call).items():
                if len(values) == found.heads:
                    found.numbers[name] = values.cpu()
                else:
                    found.missing[name] = _PAIRS
        layers.append(found)

    observe_calls(model, receive, input_ids, logits_to_keep=1)
    return layers


def _see_weights(layer: NLQAttentionProjections, call: AttentionCall, position_embeddings) -> Layer:
    query, key, value, bias = layer.prepare(call, position_embeddings)
    own_values = call.values
    length = query.shape[2]
    window, sees_own_key = layer.visible_keys
    visibility = make_visibility(length, length, 0, query.device, sliding_window=window)
    visibility = visibility if sees_own_key else visibility.of_earlier_keys()
    visible, counts = visibility.dense(), visibility.visible_count
    key = repeat_kv(key, layer.num_key_value_groups)
    query, columns = query[..., : key.shape[-1]], query[..., key.shape[-1] :]
    inputs = (query, columns, key, visible, counts[:, None], layer.scaling, bias, call)
    scores, weights = scores_and_weights(layer, *inputs)
    for part in layer.parts_with("change_weights"):
        weights = part.change_weights(call, weights)
    weights = weights[0].cpu()
    found, has_choice = Layer(layer.activation.name, len(weights)), (counts > 1)[0].cpu()
    found.add_weights(weights, has_choice)
    if len(weights) == query.shape[1]:
        found.numbers["effective_rank"] = effective_ranks(query[0].cpu())
        found.numbers["largest_score"] = largest_scores(scores[0], visible[0]).cpu()
    else:
        found.missing |= dict.fromkeys(("effective_rank", "largest_score"), _PAIRS)
    if value.shape == own_values.shape:
        own_values = own_values[0].cpu().to(weights.dtype).repeat_interleave(len(weights) // own_values.shape[1], dim=0)
        found.add_rows(has_choice, own_value_cosine=own_value_cosines(weights @ own_values, own_values))
    else:
        found.missing["own_value_cosine"] = "a head reads the values of two groups, and a token has no value of its own there"
    return found


def _see_linear(layer: NLQAttentionProjections, call: AttentionCall, position_embeddings) -> Layer:
    query, key, value = layer.project(call)
    options = {"scaling": layer.scaling, "log_decay": layer.log_decay, "position_embeddings": position_embeddings}
    outputs, _ = linear_attention(query, key, value, None, **options, form="parallel")
    found = Layer(layer.activation.name, query.shape[1])
    found.missing = dict.fromkeys(
        ("weights", "entropy", "first_token", "row_sum", "largest_score", "previous_token", "induction"), _NO_WEIGHTS
    )
    values = repeat_kv(value, layer.num_key_value_groups)[0].cpu()
    later = torch.arange(len(values[0])) > 0
    found.add_rows(later, own_value_cosine=own_value_cosines(outputs[0].transpose(0, 1).cpu(), values))
    found.numbers["effective_rank"] = effective_ranks(query[0].cpu())
    return found


@torch.no_grad()
def _look_from_outside(model: PreTrainedModel, input_ids: torch.Tensor) -> list[Layer]:
    """Measures the weights that any model of Transformers returns."""
    output = model(input_ids=input_ids.to(model.device), output_attentions=True, use_cache=False)
    layers = []
    for weights in getattr(output, "attentions", None) or ():
        layer = Layer("softmax", 0)
        if weights is None or weights.dim() != 4 or weights.shape[-2:] != (input_ids.shape[1],) * 2:
            layer.missing = dict.fromkeys(("weights", *ROWS, *HEADS), "this layer returns no map of its attention")
        else:
            layer.heads = weights.shape[1]
            layer.add_weights(weights[0].float().cpu(), torch.arange(input_ids.shape[1]) > 0)
            layer.missing = dict.fromkeys(("own_value_cosine", "effective_rank", "largest_score", "ablation"), _FROM_OUTSIDE)
        layers.append(layer)
    return layers
