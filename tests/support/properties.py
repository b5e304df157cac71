"""Settings of hypothesis that all property tests share."""

from hypothesis import HealthCheck, settings


def examples(count: int) -> settings:
    """The same `count` examples in every run, with nothing kept on disk."""
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
