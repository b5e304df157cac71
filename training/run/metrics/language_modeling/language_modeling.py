"""Loss, perplexity, bits per byte and token accuracy, as an `evaluate` metric that needs no download."""

import math

import datasets
import evaluate


_DESCRIPTION = """How well a language model predicts held-out text.

loss: mean negative log-likelihood of a token, in nats.
perplexity: exp(loss).
bits_per_byte: loss / ln 2 / bytes_per_token; unlike the loss it can be compared between tokenizers.
token_accuracy: share of tokens that the model finds the likeliest.
"""

_INPUTS = """
Args:
    negative_log_likelihood: its sum over any group of predicted tokens, in nats.
    correct: number of the group's tokens that were the likeliest.
    tokens: number of the group's predicted tokens.
    bytes_per_token: UTF-8 bytes of the text over its tokens (given to `compute`); without it no bits_per_byte.
"""


class LanguageModeling(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features(
                {
                    "negative_log_likelihood": datasets.Value("float64"),
                    "correct": datasets.Value("int64"),
                    "tokens": datasets.Value("int64"),
                }
            ),
        )

    def _compute(self, negative_log_likelihood, correct, tokens, bytes_per_token=None):
        total = sum(tokens)
        if total == 0:
            raise ValueError("tokens=0: there is nothing to evaluate")
        loss = sum(negative_log_likelihood) / total
        results = {
            "loss": loss,
            "perplexity": math.exp(loss) if loss < 700 else math.inf,
            "token_accuracy": sum(correct) / total,
        }
        if bytes_per_token is not None:
            results["bits_per_byte"] = loss / math.log(2) / bytes_per_token
        return results
