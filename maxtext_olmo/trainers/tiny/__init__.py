"""A small but real trainer: a decoder-only language model, on one process or on several.

python -m maxtext_olmo.trainers.tiny --config=configs/tiny.py --config.steps=200
"""

from maxtext_olmo.trainers.tiny.trainer import Result as Result
from maxtext_olmo.trainers.tiny.trainer import connect as connect
from maxtext_olmo.trainers.tiny.trainer import main_from_argv as main_from_argv
from maxtext_olmo.trainers.tiny.trainer import train as train
