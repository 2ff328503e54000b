"""The names of `maxtext.input_pipeline.olmo_data_grain`: source, sampler, transforms, loader."""

from maxtext_olmo.corpus.source import OlmoNpyDataSource
from maxtext_olmo.loader.olmo_grain import make_olmo_grain_data_loader
from maxtext_olmo.order.sampler import OlmoIndexSampler
from maxtext_olmo.order.stored import combine_seed_epoch as _combine_seed_epoch
from maxtext_olmo.rows.batch import ShiftToInputsTargets
from maxtext_olmo.rows.repetition import NgramFilterTransform

__all__ = [
    "NgramFilterTransform",
    "OlmoIndexSampler",
    "OlmoNpyDataSource",
    "ShiftToInputsTargets",
    "_combine_seed_epoch",
    "make_olmo_grain_data_loader",
]
