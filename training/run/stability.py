"""Stability of attention while training: entropy, extremes and normaliser of each layer, and spikes of the loss."""

import math
import statistics
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.masking_utils import find_packed_sequence_indices
from transformers.models.llama.modeling_llama import repeat_kv

from modeling_nlq.attention_nlq import scores_and_weights
from modeling_nlq.masking_nlq import Visibility
from modeling_nlq.modeling_nlq import NLQAttention
from modeling_nlq.parts_base_nlq import AttentionCall, ScoreBias

from ..observe import observe_calls, visibility_of


# Queries computed together, so that memory grows with the length and not with its square
QUERY_CHUNK = 256

# Number of earlier losses that a loss is compared with
SPIKE_WINDOW = 10

_PREFIX = "attention/layer_"


def attention_statistics(
    model: PreTrainedModel, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None
) -> list[dict[str, float]]:
    """Measures the attention of each layer on given tokens, without dropout, with any backend.

    The scores are `s_ij = scaling * q_i . k_j` and the weights `w_ij`, of the keys `j` that query `i` sees. Weights
    may be negative, hence `p_ij = |w_ij| / sum_j |w_ij|`. A row with a single key counts only for the scores.

    * `entropy`: mean over rows of `-sum_j p_ij log p_ij`, in nats, without rows of zeros.
    * `largest_weight`: the maximum of `|w_ij|`.
    * `first_token_mass`: mean over rows of `p_ij` for the first key `j` that `i` sees, without rows of zeros.
    * `zero_rows`: share of the rows whose weights are all 0.
    * `smallest_score`, `largest_score`: the extremes of `s_ij`, without the `log n` that sigmoid subtracts.

    Scores and what follows are in float32 at least. `input_ids`, `(batch, length)`, have no padding; `position_ids`
    of the same shape tell packed documents apart. Returns a dictionary per layer, empty for linear attention.
    """
    inputs: dict[str, torch.Tensor | int] = {"logits_to_keep": 1}
    segments = None
    if position_ids is not None:
        inputs["position_ids"] = position_ids.to(model.device)
        segments = find_packed_sequence_indices(inputs["position_ids"])
    records: list[dict[str, float]] = []

    def record(layer: NLQAttention, call: AttentionCall, position_embeddings) -> None:
        if layer.activation.kind == "linear":
            records.append({})
            return
        query, key, _, bias = layer.prepare(call, position_embeddings)
        visibility = visibility_of(layer, query, key, segments)
        records.append(_layer_statistics(call, query, key, bias, visibility))

    observe_calls(model, record, input_ids, **inputs)
    return records


def _layer_statistics(
    call: AttentionCall, query: torch.Tensor, key: torch.Tensor, bias: ScoreBias | None, visibility: Visibility
) -> dict[str, float]:
    layer: NLQAttention = call.layer
    # Some parts change the scores of all queries together
    rows_at_once = query.shape[2] if layer.materializes == "all" else QUERY_CHUNK
    dtype = torch.promote_types(query.dtype, torch.float32)
    query, key = query.to(dtype), repeat_kv(key.to(dtype), layer.num_key_value_groups)
    chunks = []
    with torch.autocast(query.device.type, enabled=False):
        for start in range(0, query.shape[2], rows_at_once):
            stop = start + rows_at_once
            # In causal order no query of the chunk sees a later key
            seen = key[:, :, :stop] if layer.is_causal else key
            part = visibility.rows(start, stop, seen.shape[2])
            own = None if bias is None else ScoreBias(bias.query[..., start:stop], bias.key[..., : seen.shape[2]])
            chunks.append(_row_statistics(call, query[:, :, start:stop], seen, own, part))
    rows = {name: torch.cat([chunk[name] for chunk in chunks], dim=-1) for name in chunks[0]}
    has_choice = (visibility.visible_count > 1)[:, None].expand_as(rows["total_weight"])
    chosen = {name: values[has_choice] for name, values in rows.items()}
    is_zero = chosen["total_weight"] == 0
    quantities = {
        "entropy": (torch.mean, chosen["entropy"][~is_zero]),
        "largest_weight": (torch.max, chosen["largest_weight"]),
        "first_token_mass": (torch.mean, chosen["first_token_mass"][~is_zero]),
        "zero_rows": (torch.mean, is_zero.to(dtype)),
        "smallest_score": (torch.min, rows["smallest_score"]),
        "largest_score": (torch.max, rows["largest_score"]),
    }
    return {name: reduce(values).item() for name, (reduce, values) in quantities.items() if values.numel()}


def _row_statistics(
    call: AttentionCall, query: torch.Tensor, key: torch.Tensor, bias: ScoreBias | None, visibility: Visibility
) -> dict[str, torch.Tensor]:
    """Returns each quantity by row, `(batch, heads, query)`; NaN for a row of zeros that has none."""
    layer: NLQAttention = call.layer
    visible = visibility.dense()
    count = visibility.visible_count[:, None]
    query, columns = query[..., : key.shape[-1]], query[..., key.shape[-1] :]
    scores, weights = scores_and_weights(layer, query, columns, key, visible, count, layer.scaling, bias, call)
    weights = weights.abs()
    total = weights.sum(dim=-1, keepdim=True)
    shares = weights / total
    first_key = visible.to(torch.uint8).argmax(dim=-1, keepdim=True)
    return {
        "total_weight": total.squeeze(-1),
        "entropy": torch.special.entr(shares).sum(dim=-1),
        "largest_weight": weights.amax(dim=-1),
        "first_token_mass": shares.gather(-1, first_key.expand(*shares.shape[:-1], 1)).squeeze(-1),
        "smallest_score": scores.masked_fill(~visible, torch.inf).amin(dim=-1),
        "largest_score": scores.masked_fill(~visible, -torch.inf).amax(dim=-1),
    }


class StabilityCallback(TrainerCallback):
    """Logs `attention_statistics` of the same tokens as `attention/layer_0/entropy` and so on.

    It does so after the first step, regularly, and after the last, on every process, which a sharded model needs.
    """

    def __init__(
        self, trainer: Trainer, input_ids: torch.Tensor, interval: int, position_ids: torch.Tensor | None = None
    ):
        self.trainer = trainer
        self.input_ids = input_ids
        self.interval = interval
        self.position_ids = position_ids

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        if state.global_step != 1 and state.global_step % self.interval and state.global_step < state.max_steps:
            return
        layers = attention_statistics(self.trainer.model, self.input_ids, self.position_ids)
        # Logging clears this flag, and Trainer would leave out the loss of this step
        should_log = control.should_log
        self.trainer.log(
            {f"{_PREFIX}{index}/{name}": layer[name] for index, layer in enumerate(layers) for name in layer}
        )
        control.should_log = should_log


def read_stability(log_history: list[dict[str, float]]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Reads the curves in Trainer's `log_history`: `(optimizer step, value)` by layer and quantity."""
    curves: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for entry in log_history:
        for key in filter(lambda key: key.startswith(_PREFIX), entry):
            layer, quantity = key.removeprefix(_PREFIX).split("/")
            curves.setdefault(layer, {}).setdefault(quantity, []).append((entry["step"], entry[key]))
    return curves


def loss_spikes(losses: Sequence[tuple[int, float]]) -> list[int]:
    """Returns the steps at which the training loss leaps, from `(optimizer step, nats per token)` as logged.

    It then exceeds the median `m` of the 10 losses before by more than 0.1 nats and by more than 5 standard
    deviations, estimated as `1.4826 * median |loss - m|`. Of the first 10, only infinite and NaN losses are spikes.
    """
    spikes = []
    for index, (step, loss) in enumerate(losses):
        before = [earlier for _, earlier in losses[max(index - SPIKE_WINDOW, 0) : index] if math.isfinite(earlier)]
        is_spike = not math.isfinite(loss)
        if not is_spike and index >= SPIKE_WINDOW and before:
            median = statistics.median(before)
            deviation = 1.4826 * statistics.median(abs(earlier - median) for earlier in before)
            is_spike = loss - median > max(0.1, 5 * deviation)
        if is_spike:
            spikes.append(step)
    return spikes
