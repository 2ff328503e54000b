"""Padding, compiled shapes and speed of evaluation batches, for lengths like those of known tasks.

unsorted           batches in request order, each padded to its longest request
sorted per host    every host sorts its own requests; a step is padded to the longest of all
sorted globally    one request per row, all sorted, few lengths
packed             several requests per row, as `JaxLM` does where the model allows it
"""

import argparse
import time

import jax
import numpy as np

from maxtext_olmo.evaluation import packing
from maxtext_olmo.evaluation import requests as requests_lib
from maxtext_olmo.evaluation import scoring
from maxtext_olmo.trainers.tiny import model
from tests.benchmarks import figures

_MULTIPLE, _LONGEST, _VOCABULARY = 16, 2048, 64
# For each task its share of the requests, the median length in tokens, and the spread of its log.
SETS = {
    "zero-shot": ((0.25, 35, 0.35), (0.15, 40, 0.5), (0.3, 90, 0.3), (0.15, 170, 0.4),
                  (0.15, 600, 0.4)),
    "five-shot": ((0.1, 180, 0.05), (0.1, 260, 0.12), (0.2, 300, 0.12), (0.2, 560, 0.1),
                  (0.3, 680, 0.25), (0.1, 850, 0.12)),
    "HellaSwag, five-shot": ((1.0, 560, 0.1),),
}  # fmt: skip


def make_lengths(count: int, name: str) -> list[int]:
  """Returns the lengths of a set's requests, task after task."""
  rng = np.random.default_rng(0)
  drawn = [rng.lognormal(np.log(m), s, round(count * share)) for share, m, s in SETS[name]]
  return np.clip(np.concatenate(drawn), 2, _LONGEST).astype(int).tolist()


def step_lengths(lengths: list[int], way: str, batch: int, hosts: int) -> list[int]:
  """Returns the padded length of each step."""
  if way in ("packed", "sorted globally"):
    how = dict(pack=way == "packed", max_length=_LONGEST, overhead=scoring.RUNS)
    return [step.length for step in packing.plan_steps(lengths, batch, _MULTIPLE, **how)]
  hosts = hosts if way == "sorted per host" else 1
  local = [lengths[host::hosts] for host in range(hosts)]
  if way == "sorted per host":
    local = [sorted(part, reverse=True) for part in local]
  size = batch // hosts
  starts = range(0, max(map(len, local)), size)
  longest = [max(max(part[i : i + size], default=1) for part in local) for i in starts]
  return [-(-length // _MULTIPLE) * _MULTIPLE for length in longest]


def _score(lengths: list[int], batch: int) -> dict[str, list[float]]:
  """Scores requests on a small model, packed and one per row, and returns the times of 4 rounds."""
  sizes = dict(emb_dim=128, num_layers=1, num_heads=1, head_dim=128, mlp_dim=384)
  config = model.ModelConfig(vocab_size=_VOCABULARY, **sizes)
  params = model.init(jax.random.key(0), config)
  names = ("inputs", "inputs_position", "inputs_segmentation")
  rng = np.random.default_rng(0)
  rows = [
      requests_lib.Row(rng.integers(0, _VOCABULARY, n + 1), 1 + n // 10, i)
      for i, n in enumerate(lengths)
  ]
  mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))

  def apply(params: model.Params, inputs: object) -> jax.Array:
    return model.apply(params, {name: getattr(inputs, name) for name in names}, config)

  shape = dict(batch_size=batch, padding_multiple=_MULTIPLE, max_length=_LONGEST)
  scorers = {
      "sorted globally": scoring.Scorer(apply, mesh, packing=False, **shape),
      "packed": scoring.Scorer(apply, mesh, packing="auto", **shape),
  }

  def run(name: str) -> figures.Run:
    began = time.perf_counter()
    list(scorers[name].scores(params, rows))
    return {"seconds": time.perf_counter() - began}

  found = figures.alternate(list(scorers), 4, run)
  return {name: [values["seconds"] for values in runs] for name, runs in found.items()}


def main() -> None:
  """Prints padding and shapes of all ways, and the speed of two."""
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  for flag, default, text in (
      ("--requests", 8192, "requests whose padding and shapes are counted"),
      ("--timed-requests", 1024, "zero-shot requests that are scored"),
      ("--batch-size", 64, "rows of a batch"),
      ("--hosts", 4, "hosts that sort their own requests"),
  ):
    parser.add_argument(flag, type=int, default=default, help=f"{text} (default: %(default)s)")
  args = parser.parse_args()
  ways, rows = ("unsorted", "sorted per host", "sorted globally", "packed"), []
  for name in SETS:
    lengths = make_lengths(args.requests, name)
    steps = [step_lengths(lengths, way, args.batch_size, args.hosts) for way in ways]
    padding = [1 - sum(lengths) / (args.batch_size * sum(step)) for step in steps]
    rows.append((name, *(f"{p:.1%}, {len(set(s))} shapes" for p, s in zip(padding, steps))))
  print(f"Batches of {args.batch_size}; {figures.machine()}.\n\n{figures.table(('', *ways), rows)}")
  times = _score(make_lengths(args.timed_requests, "zero-shot"), args.batch_size)
  rates = [
      (name, *(f"{args.timed_requests / seconds:,.0f}" for seconds in (found[0], min(found[1:]))))
      for name, found in times.items()
  ]
  print(figures.table(("zero-shot requests/s", "with compilation", "once compiled"), rates))


if __name__ == "__main__":
  main()
