"""What sorting and packing do for evaluation: padding, compiled shapes and requests per second, side by side.

    unsorted     batches in request order, each padded to its longest row
    per host     requests are dealt to hosts in turn, as the harness does it, and each host sorts its own; a step is
                 padded to the longest row of all hosts
    global       all requests sorted, a row each, few lengths chosen (`lmeval_datasets`)
    packed       what `JaxLM` does: several requests in a row (`lmeval_packing`)

Lengths are drawn to look like well-known harness tasks, without and with examples before the question.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from maxtext_olmo.evaluation import datasets as datasets_lib
from maxtext_olmo.evaluation import packing as packing_lib
from maxtext_olmo.evaluation import pipeline as pipeline_lib
from maxtext_olmo.evaluation import probe
from maxtext_olmo.evaluation import requests as requests_lib
from maxtext_olmo.evaluation import scoring
from maxtext_olmo.rows import llm_batch
from maxtext_olmo.trainers.tiny import model

_MULTIPLE = 16
_VOCABULARY = 64
_LONGEST = 2048
_ROUNDS = 3
_PACKED = "packed"
# Share of the requests, median length in tokens, and spread (of the logarithm), roughly as of these tasks.
_SETS = {
    "zero-shot": {
        "ARC": (0.25, 35, 0.35),
        "PIQA": (0.15, 40, 0.5),
        "HellaSwag": (0.3, 90, 0.3),
        "BoolQ": (0.15, 170, 0.4),
        "MMLU, 5-shot": (0.15, 600, 0.4),
    },
    "five-shot": {
        "WinoGrande": (0.1, 180, 0.05),
        "PIQA": (0.1, 260, 0.12),
        "ARC": (0.2, 300, 0.12),
        "HellaSwag": (0.2, 560, 0.1),
        "MMLU": (0.3, 680, 0.25),
        "BoolQ": (0.1, 850, 0.12),
    },
    "HellaSwag, five-shot": {"HellaSwag": (1.0, 560, 0.1)},
}

Batches = list[llm_batch.LLMIndexedBatch]
Rows = Sequence[requests_lib.Row]


@dataclasses.dataclass(frozen=True)
class Speed:
  """How long one way took for all requests."""

  seconds: float  # compilation included
  seconds_again: float  # once more, with everything compiled


def measure(*, requests: int, timed_requests: int, batch_size: int, hosts: int) -> str:
  """Compares the ways and returns tables.

  Args:
    requests: of each set, to count padding and shapes of.
    timed_requests: of the first set, to run.
  """
  lines = [
      f"Batches of {batch_size}, lengths in multiples of {_MULTIPLE}; {os.cpu_count()} cores,"
      f" {platform.machine()}, Python {platform.python_version()}.",
      "",
      f"Padding, and shapes to compile, of {requests:,} requests with lengths roughly as of these tasks:",
      "",
      "| | " + " | ".join(_ways(hosts)) + " |",
      "|---|" + "---:|" * len(_ways(hosts)),
  ]
  for name in _SETS:
    rows = make_rows(requests, name)
    made = [make(rows, batch_size) for make in _ways(hosts).values()]
    cells = [f"{padding_share(b):.1%}, {len({x.inputs.shape for x in b})} shapes" for b in made]
    lines.append(f"| {name} | " + " | ".join(cells) + " |")
  speeds = _time(make_rows(timed_requests, next(iter(_SETS))), batch_size, hosts)
  best = list(speeds.values())[-1]
  lines += [
      "",
      f"{timed_requests:,} {next(iter(_SETS))} requests on a small model; the ways take turns, the best of {_ROUNDS}"
      " once compiled. Packed includes trying it out:",
      "",
      "| | requests/s | once compiled | time against packed |",
      "|---|---:|---:|---:|",
  ]
  for name, speed in speeds.items():
    lines.append(
        f"| {name} | {timed_requests / speed.seconds:,.0f} |"
        f" {timed_requests / speed.seconds_again:,.0f} |"
        f" {speed.seconds / best.seconds:.1f} x, once compiled"
        f" {speed.seconds_again / best.seconds_again:.1f} x |"
    )
  return "\n".join(lines) + "\n"


def _ways(hosts: int) -> dict[str, Callable[[Rows, int], Batches]]:
  return {
      "unsorted": unsorted,
      f"sorted on each of {hosts} hosts": lambda rows, size: sorted_per_host(rows, size, hosts),
      "sorted globally": sorted_globally,
      _PACKED: packed,
  }


def make_rows(count: int, name: str, seed: int = 0) -> list[requests_lib.Row]:
  """Rows with the lengths of a set, in the order that its tasks ask for them."""
  rng = np.random.default_rng(seed)
  lengths = np.concatenate(
      [
          rng.lognormal(np.log(median), spread, size=round(count * share))
          for share, median, spread in _SETS[name].values()
      ]
  )
  lengths = np.clip(lengths, 2, _LONGEST).astype(int)
  return [
      requests_lib.Row(rng.integers(0, _VOCABULARY, size=n + 1), 1 + int(n) // 10, i)
      for i, n in enumerate(lengths)
  ]


def unsorted(rows: Rows, batch_size: int) -> Batches:
  """Batches in request order."""
  return _padded(_cut(rows, batch_size), batch_size)


def sorted_per_host(rows: Rows, batch_size: int, hosts: int) -> Batches:
  """Each host sorts every n-th request; step k is the k-th batch of each."""
  local = [
      _cut(sorted(rows[host::hosts], key=lambda row: -row.length), batch_size // hosts)
      for host in range(hosts)
  ]
  steps = max(map(len, local))
  groups = [[row for part in local if k < len(part) for row in part[k]] for k in range(steps)]
  return _padded(groups, batch_size)


def sorted_globally(rows: Rows, batch_size: int) -> Batches:
  """One request per row, as `lmeval_preprocessing_pipeline` does it."""
  batches = pipeline_lib.local_batches(
      rows, batch_size, host=0, host_count=1, padding_multiple=_MULTIPLE
  )
  return [batches[i] for i in range(len(batches))]


def packed(rows: Rows, batch_size: int) -> Batches:
  """Several requests per row, as `JaxLM` does it; finding out whether the model allows it comes on top."""
  steps = packing_lib.plan_steps(
      [row.length for row in rows],
      batch_size,
      _MULTIPLE,
      pack=True,
      max_length=_LONGEST,
      overhead=probe.RUNS,
  )
  return [packing_lib.step_batch(step, rows, 0, batch_size) for step in steps]


def padding_share(batches: Batches) -> float:
  """The share of tokens that are padding, filler rows included."""
  real = sum(int(np.count_nonzero(batch.inputs_segmentation)) for batch in batches)
  return 1 - real / sum(batch.inputs.size for batch in batches)


def _cut(rows: Rows, size: int) -> list[Rows]:
  return [rows[i : i + size] for i in range(0, len(rows), size)]


def _padded(groups: Sequence[Rows], batch_size: int) -> Batches:
  complete = datasets_lib.CompleteLLMIndexedBatch()
  batches = []
  for group in groups:
    samples = [complete.map(requests_lib.row_arrays(row)) for row in group]
    joined = {
        name: datasets_lib._pad_batch_multiple(
            [sample[name] for sample in samples], _MULTIPLE, batch_size_pad=batch_size
        )
        for name in samples[0]
    }
    batches.append(llm_batch.LLMIndexedBatch(**joined))
  return batches


def _time(rows: Rows, batch_size: int, hosts: int) -> dict[str, Speed]:
  # Wide enough that attention, which grows with the row, is not nearly all of its work.
  config = model.ModelConfig(
      vocab_size=_VOCABULARY, emb_dim=128, num_layers=1, num_heads=1, head_dim=128, mlp_dim=384
  )
  params = model.init(jax.random.key(0), config)

  def apply(params: model.Params, batch: llm_batch.LLMIndexedBatch) -> jax.Array:
    names = ("inputs", "inputs_position", "inputs_segmentation")
    return model.apply(params, {name: getattr(batch, name) for name in names}, config)

  mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
  ways = _ways(hosts)
  # A scorer each, so that each compiles its own shapes.
  scorers = {
      name: scoring.Scorer(
          apply, mesh, batch_size=batch_size, padding_multiple=_MULTIPLE, max_length=_LONGEST
      )
      for name in ways
  }
  times: dict[str, list[float]] = {name: [] for name in ways}
  for _ in range(1 + _ROUNDS):
    for name, make in ways.items():
      began = time.perf_counter()
      if name == _PACKED:
        list(scorers[name].scores(params, rows))
      else:
        batches = make(rows, batch_size)
        jax.block_until_ready([scorers[name].run(params, batch) for batch in batches])
      times[name].append(time.perf_counter() - began)
  return {name: Speed(seconds[0], min(seconds[1:])) for name, seconds in times.items()}
