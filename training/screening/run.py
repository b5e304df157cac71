"""Makes the runs of a screening, and confirms the changes that survive against the baseline."""

from pathlib import Path

import numpy as np

from ..comparison.config import read_made_from
from ..comparison.inference import ALPHA
from ..comparison.run import Engine, is_main_process, run_and_report, run_comparison
from ..comparison.status import CONFIRMATION, SCREENING
from ..disk import write_text
from ..files import COMPARISON_FILE, RESULTS_FILE
from ..run.run_folder import CLAIM_PATIENCE, RunFolder
from ..sharing.scrub import without_folders
from ..values import to_json
from .effects import analyse_effects
from .plan import Screening
from .plan import read_screening as read_screening  # for those who then make its runs
from .sections import Factor, ScreeningOutcome, write_report


@run_and_report.register
def _(screening: Screening, folder: Path, engine: Engine | None = None) -> ScreeningOutcome:
    claimed, config = RunFolder(folder, COMPARISON_FILE), screening.config.to_dict()
    with claimed.held(CLAIM_PATIENCE):
        claimed.claim(config, lambda before: read_made_from(before, str(folder / COMPARISON_FILE)).to_dict())
    made = run_comparison(screening.runs, folder / SCREENING, engine)
    # The test split is for the confirmation alone: what survives is chosen on the validation split
    losses = {
        name: [None if run.diverged else run.validation_loss for run in made.largest.models[name].runs]
        for name in screening.runs.largest.variants
    }
    diverged = [name for name, values in losses.items() if None in values]
    effects = None if diverged else analyse_effects(screening.design, np.array(list(losses.values())))
    confirmation = None
    if effects is not None and effects.survivors:
        confirmation = run_and_report(screening.confirm(effects.survivors), folder / CONFIRMATION, engine)
    results = ScreeningOutcome(
        name=screening.name,
        command=screening.runs.command,
        comparison=without_folders(config),
        factors={
            name: Factor(without_folders(factor.to_dict()), screening.added_parameters(name))
            for name, factor in screening.config.factors.items()
        },
        design=screening.design,
        rates=list(screening.config.rates.listed),
        alpha=ALPHA,
        split="validation",
        effects=effects,
        diverged=diverged,
        runs=made,
        confirmation=confirmation,
    )
    write_text(folder / RESULTS_FILE, to_json(results))
    if is_main_process():
        write_report(results, folder)
    return results
