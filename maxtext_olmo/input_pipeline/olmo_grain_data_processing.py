"""The names of `maxtext.input_pipeline.olmo_grain_data_processing`: the trainer's iterators."""

from maxtext_olmo.loader.olmo_grain import make_olmo_grain_eval_iterator
from maxtext_olmo.loader.olmo_grain import make_olmo_grain_train_iterator

__all__ = ["make_olmo_grain_eval_iterator", "make_olmo_grain_train_iterator"]
