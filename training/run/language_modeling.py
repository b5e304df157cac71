"""Loss, perplexity, bits per byte and token accuracy, as an `evaluate` metric that needs no download."""

import math

import datasets
import evaluate


_DESCRIPTION = """loss (nats per token), perplexity, bits_per_byte (comparable between tokenizers), token_accuracy,
of groups of tokens: their summed negative_log_likelihood in nats, how many were the likeliest (correct), and how many
there are (tokens). compute takes bytes_per_token, the UTF-8 bytes of the text over its tokens; without it there is no
bits_per_byte."""


class LanguageModeling(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description="",
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
        if bytes_per_token:  # a text of special tokens alone has no bytes
            results["bits_per_byte"] = loss / math.log(2) / bytes_per_token
        return results
