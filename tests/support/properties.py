"""Settings of hypothesis that all property tests share."""

from hypothesis import HealthCheck, Phase, settings


def examples(count: int, shrinks: bool = True) -> settings:
    """The same `count` examples in every run, with nothing kept on disk.

    `shrinks` is false where an example takes so long that the smallest failing one would take minutes.
    """
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        phases=[Phase.explicit, Phase.generate, *([Phase.shrink] if shrinks else [])],
    )
