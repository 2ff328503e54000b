"""Padding and speed of the packings, side by side, on documents of realistic lengths.

Two sets of documents: lengths drawn from a lognormal distribution, and the documents of the corpus that `maxtext-olmo demo`
makes, as often as it takes to fill four times the rows that are packed at a time: fewer would all be open at once. Each
packing fills rows from the same documents in the same order; the packings take turns, and the rows per second are medians.
"""

from __future__ import annotations

import os
import pathlib
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import grain
import numpy as np

from maxtext_olmo.cli import demo
from maxtext_olmo.corpus import document_source
from maxtext_olmo.corpus import documents as documents_lib
from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.grain_llm import row_dataset
from maxtext_olmo.grain_llm import row_maker
from maxtext_olmo.order import base
from maxtext_olmo.order import permutations
from maxtext_olmo.rows import packing
from maxtext_olmo.rows import plan as plan_lib
from maxtext_olmo.rows import records as tokens_lib
from maxtext_olmo.rows import rows as rows_lib

_MEAN_LOG, _SIGMA = 6.0, 1.2  # a median of 403 tokens and a mean of 829: web text
_WINDOWS = 4


def measure(*, documents: int, length: int, bins: int, repeats: int) -> str:
  """Measures all packings on both sets and returns tables."""
  lines = [
      f"Packing into rows of {length} tokens, {bins} rows at a time, one epoch; medians of {repeats} runs that take turns;",
      f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}.",
  ]
  with tempfile.TemporaryDirectory(prefix="maxtext_olmo_bench_") as directory:
    for title, source in (
        (
            f"lognormal lengths (median {np.exp(_MEAN_LOG):.0f})",
            _lognormal(pathlib.Path(directory, "lognormal"), documents),
        ),
        _demo(pathlib.Path(directory, "demo"), _WINDOWS * bins * length),
    ):
      lines += ["", *_table(title, source, length, bins, repeats)]
  return "\n".join(lines) + "\n"


def _table(
    title: str,
    source: document_source.OlmoDocumentSource,
    length: int,
    bins: int,
    repeats: int,
) -> list[str]:
  # Lists in memory for all: what is compared is packing, not reading.
  order = permutations.FeistelOrder(num_instances=len(source), seed=0)
  ids = order.ids(0, np.arange(len(source)))
  pieces = _pieces(source, ids, length)
  ways: dict[str, Callable[[], tuple[int, int]]] = {
      name: (lambda name=name: _streamed(pieces, name, length, bins)) for name in packing.STREAMING  # type: ignore[misc]
  }
  ways["planned"] = lambda: _planned(source, order, length, bins)
  found: dict[str, list[float]] = {name: [] for name in ways}
  counts: dict[str, tuple[int, int]] = {}
  for _ in range(repeats):
    for name, way in ways.items():
      began = time.perf_counter()
      counts[name] = way()
      found[name].append(counts[name][0] / (time.perf_counter() - began))
  reference = statistics.median(found["first_fit"])
  lines = [
      f"{title}: {len(source):,} documents, {source.documents.num_tokens:,} tokens",
      "",
      "| packing | rows | padding | rows/s ÷ first_fit's |",
      "|---|---:|---:|---:|",
  ]
  for name, (rows, used) in counts.items():
    speed = statistics.median(found[name]) / reference
    lines.append(f"| {name} | {rows:,} | {1 - used / (rows * length):.2%} | {speed:.2f} |")
  return lines


def _pieces(
    source: document_source.OlmoDocumentSource, ids: np.ndarray, length: int
) -> list[dict[str, np.ndarray]]:
  found = []
  for i in ids.tolist():
    found += tokens_lib.fit(tokens_lib.record_of(source[i]), length, "split")
  return found


def _streamed(
    pieces: list[dict[str, np.ndarray]], name: str, length: int, bins: int
) -> tuple[int, int]:
  documents = grain.MapDataset.source(pieces).to_iter_dataset(
      grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
  )
  rows = packing.pack_stream(documents, name, length=length, bins=bins, shuffle=True, seed=0)
  count = used = 0
  for row in rows.map(row_dataset.ShiftRow(rows_lib.Shift())):
    count += 1
    used += int(np.count_nonzero(row["inputs_segmentation"]))
  return count, used


def _planned(
    source: document_source.OlmoDocumentSource, order: base.Order, length: int, bins: int
) -> tuple[int, int]:
  """As training has it: the plan is made, and the tokens are read from the files, in batches of 32 rows."""
  plan = plan_lib.PackingPlan(
      source.lengths,
      order,
      identity="bench",
      row_length=length,
      window=row_maker.window_of(source, len(source), bins, length),
  )
  rows = rows_lib.PlannedRows(source, plan, length, num_epochs=1)
  count = used = 0
  while rows.has(count):
    end = count + 32 if rows.has(count + 31) else plan.count(1)
    made = rows.rows(np.arange(count, end))
    used += int(np.count_nonzero(made["inputs_segmentation"]))
    count = end
  return count, used


def _lognormal(directory: pathlib.Path, documents: int) -> document_source.OlmoDocumentSource:
  rng = np.random.default_rng(0)
  lengths = np.maximum(1, rng.lognormal(_MEAN_LOG, _SIGMA, documents)).astype(np.int64)
  tokens = rng.integers(1, 50_000, int(lengths.sum()), dtype=np.uint32)
  tokens[np.cumsum(lengths) - 1] = 0
  directory.mkdir()
  tokens.tofile(directory / "part-0.npy")
  index = index_lib.build_index([(str(directory / "part-0.npy"), "web")], 8, tokenizer="none")
  return _open(index, directory, 0)


def _demo(directory: pathlib.Path, tokens: int) -> tuple[str, document_source.OlmoDocumentSource]:
  """The demo corpus, and what it is called, or a larger one with each of its documents so often that it has the tokens."""
  documents = {kind: list(texts) for kind, texts in demo.docstrings().items()}
  made, index = demo.build_corpus(documents, directory / "once")
  title = f"the demo corpus (median {_median(documents):.0f})"
  times = -(-tokens // made.tokens)
  if times > 1:
    title += f", {times} times each of its {made.documents:,} documents of {made.tokens:,} tokens"
    repeated = {kind: texts * times for kind, texts in documents.items()}
    made, index = demo.build_corpus(repeated, directory / "repeated")
  return title, _open(index, directory, made.eos_id)


def _median(documents: dict[str, list[str]]) -> float:
  """Of the documents' lengths in tokens, which are bytes and an EOS."""
  return statistics.median(len(text.encode()) + 1 for texts in documents.values() for text in texts)


def _open(index: Any, directory: pathlib.Path, eos_id: int) -> document_source.OlmoDocumentSource:
  documents = documents_lib.build_documents(index, directory / "index.documents", eos_id)
  return document_source.OlmoDocumentSource(index, documents)
