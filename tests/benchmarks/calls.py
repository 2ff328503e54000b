"""The Python calls of this package, and the objects that take part, for each step of a trainer.

The calls of all threads are counted in steady state, with prefetching as it is by default, over
windows of a small corpus. Calls into NumPy, JAX and Grain are not counted, nor those that a
compiled function makes. Work that is done once for a block of steps counts with its share.
"""

import argparse
import collections
import pathlib
import sys
import tempfile
import threading
import types
from typing import Any

import jax
import numpy as np

import maxtext_olmo
from maxtext_olmo.rows import reader
from tests import corpora

_PACKAGE = str(pathlib.Path(maxtext_olmo.__file__).parent) + "/"
_LENGTH, _BATCH, _WARM_UP = 32, 8, 30


_READING = ("loader", "rows", "corpus")
_Counter = collections.Counter[Any]


def count_calls(index_path: str, steps: int) -> tuple[_Counter, _Counter]:
  """Returns the calls of each function in `steps` steps, and those of each class (room, name)."""
  calls: _Counter = collections.Counter()
  methods: _Counter = collections.Counter()
  counting = False

  def count(frame: types.FrameType, event: str, arg: Any) -> None:
    del arg
    code = frame.f_code
    if counting and event == "call" and code.co_filename.startswith(_PACKAGE):
      calls[f"{code.co_filename[len(_PACKAGE):]}: {code.co_qualname}"] += 1
      if "self" in code.co_varnames[: code.co_argcount]:
        kind = type(frame.f_locals["self"])
        methods[kind.__module__.split(".")[1], kind.__name__] += 1

  config = maxtext_olmo.get_config()
  config.olmo_index_path = index_path
  config.max_target_length, config.global_batch_size_to_load = _LENGTH, _BATCH
  config.enable_checkpointing = False
  reader.compile_reads(np.uint32)
  threading.setprofile(count)  # For the threads that the iterator starts.
  train, _ = maxtext_olmo.create_data_iterator(config, jax.sharding.Mesh(jax.devices(), ("data",)))
  sys.setprofile(count)
  for step in range(_WARM_UP + steps):
    counting = step >= _WARM_UP
    next(train)
  counting = False
  sys.setprofile(None)
  threading.setprofile(None)
  train.close()
  return calls, methods


def main() -> None:
  """Prints the calls of each function per step, the most frequent first."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--steps", type=int, default=1024, help="(default: %(default)s)")
  args = parser.parse_args()
  with tempfile.TemporaryDirectory() as directory:
    path, _ = corpora.write_corpus(
        directory, tokens_per_file=(40_000,) * 4, sequence_length=_LENGTH, dtype="uint32"
    )
    calls, methods = count_calls(path, args.steps)
  each_step = [name for name, count in calls.most_common() if count >= args.steps]
  for name in each_step:
    print(f"{calls[name] / args.steps:6.2f}  {name}")
  rest = calls.total() - sum(calls[name] for name in each_step)
  others = len(calls) - len(each_step)
  print(f"{rest / args.steps:6.2f}  {others} functions that run for many steps at once")
  print(f"{calls.total() / args.steps:6.2f}  calls per step")
  found = sorted(key for key, count in methods.items() if count >= args.steps)
  for reads, what in ((True, "from next() to the reads"), (False, "that send and count")):
    names = [name for room, name in found if (room in _READING) == reads]
    print(f"{len(names):6d}  kinds of objects {what}: {', '.join(names)}")


if __name__ == "__main__":
  main()
