"""Padding and speed of the packings of documents, as `dataset_type=olmo_documents` delivers them.

Each packing reads one epoch of the same documents (lognormal lengths, 400 tokens in the median) in
batches of 32 rows, up to arrays on devices. The packings take turns.

Then rows are planned as OLMo-core packs them (`dataset_type=olmo_packed`), over documents of 1,000
tokens on average, in groups of 8 files, as many groups at a time as there are cores. Documents are
found by their EOS, which reads all tokens, or in boundary files (csv.gz), which reads no token. The
yardstick is a loop that only reads the files and compares each token with the EOS. Each plan is
made in a process of its own; the time for 100 billion tokens is extrapolated.
"""

import argparse
import gzip
import json
import pathlib
import tempfile
import time

import jax
import numpy as np

import maxtext_olmo
from maxtext_olmo.corpus import document_spans
from maxtext_olmo.rows import packed_plan
from maxtext_olmo.rows import packing as packing_lib
from maxtext_olmo.rows import tie_order
from tests.benchmarks import corpus
from tests.benchmarks import figures

_PLANNED_TOKENS = 100_000_000_000
_PACKINGS = ("first_fit", "best_fit", "concat_then_split", "planned")
_BATCH = 32
_FILES, _GROUP = 32, 8


def run(packing: str, index: str, length: int, bins: int) -> figures.Run:
  """Reads one epoch and counts its rows and real tokens."""
  config = maxtext_olmo.get_config()
  config.update(dataset_type="olmo_documents", olmo_index_path=index, olmo_eos_id=corpus.EOS_ID)
  config.update(olmo_packing=packing, olmo_packing_bins=bins, olmo_num_epochs=1)
  config.update(max_target_length=length, global_batch_size_to_load=_BATCH)
  mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
  train, _ = maxtext_olmo.create_data_iterator(config, mesh)
  found = {"rows": 0.0, "tokens": 0.0, "places": 0.0}
  began = time.perf_counter()
  for batch in train:
    real = np.asarray(batch["inputs_segmentation"]) != 0
    found["rows"] += np.count_nonzero(real.any(axis=1))
    found["tokens"] += np.count_nonzero(real)
  train.close()
  return {**found, "places": found["rows"] * length, "seconds": time.perf_counter() - began}


def write_documents(folder: pathlib.Path, num_tokens: int, num_files: int) -> None:
  """Writes token files with documents of 1,000 tokens on average, boundary files, and an index."""
  rng = np.random.default_rng(0)
  size = num_tokens // num_files
  for number in range(num_files):
    tokens = rng.integers(1, corpus.EOS_ID, size, dtype=np.uint32)
    lengths = rng.lognormal(np.log(1000) - 0.5, 1, size // 800).astype(np.int64) + 1
    ends = np.cumsum(lengths)
    ends = ends[ends < size]
    tokens[ends - 1] = corpus.EOS_ID
    tokens.tofile(folder / f"{number:03d}.npy")
    spans = zip([0, *ends.tolist()], ends.tolist())
    lines = "".join(f"{start},{end}\n" for start, end in spans)
    (folder / f"{number:03d}.csv.gz").write_bytes(gzip.compress(lines.encode(), 1))
  entries = [(f"{number:03d}.npy", "web") for number in range(num_files)]
  index = maxtext_olmo.build_index(entries, 8192, tokenizer="none", base=str(folder))
  index.save(str(folder / "plan.json"))


def scan_files(index: maxtext_olmo.OlmoNpyIndex) -> int:
  """Reads all files, and returns the number of EOS; the least work that finds documents."""
  found = 0
  for number in range(len(index.files)):
    with open(index.resolve(number), "rb", buffering=0) as file:
      while piece := file.read(4 << 20):
        found += int(np.count_nonzero(np.frombuffer(piece, np.uint32) == corpus.EOS_ID))
  return found


def plan_here(folder: pathlib.Path, boundaries: str, length: int) -> dict[str, float]:
  """Plans rows in this process, and returns what it took."""
  index = maxtext_olmo.load_index(str(folder / "plan.json"))
  tie_order.compile_sort()
  packing_lib.compile_best_fit()
  source = document_spans.BoundaryRule(boundaries, corpus.EOS_ID)
  rule = packed_plan.PackingRule(length, _GROUP, "truncate", "avx512", source)
  cpu, times = [time.process_time()], [time.perf_counter()]

  def lap() -> None:
    cpu.append(time.process_time())
    times.append(time.perf_counter())

  documents = scan_files(index)
  lap()
  before = figures.memory("VmHWM")
  plan = packed_plan.build_plan(index, folder / "plan", rule)
  lap()
  packed_plan.load_plan(folder / "plan", index, rule).parts(np.arange(8))
  lap()
  return {
      "documents": documents,
      "rows": plan.num_rows,
      "padding": 1 - plan.num_tokens / plan.num_rows / length,
      "scan_seconds": times[1] - times[0],
      "scan_cpu": cpu[1] - cpu[0],
      "seconds": times[2] - times[1],
      "cpu": cpu[2] - cpu[1],
      "open": times[3] - times[2],
      "bytes": figures.memory("VmHWM") - before,
      "peak": figures.memory("VmHWM"),
  }


def plan_rows(folder: pathlib.Path, num_tokens: int) -> None:
  """Plans packed rows of some lengths, and prints a table."""
  write_documents(folder, num_tokens, num_files=_FILES)
  rows = []
  scale = _PLANNED_TOKENS / num_tokens / 60
  for boundaries in ("eos", "csv"):
    for length in (8192, 65536):
      found = figures.fresh_process(__file__, "--plan-here", folder, boundaries, length)
      rows.append(
          (
              f"{boundaries}, rows of {length:,}",
              f"{found['rows']:,}",
              f"{found['padding']:.3%}",
              f"{found['cpu'] / found['scan_cpu']:.2f}",
              f"{found['seconds'] / found['scan_seconds']:.2f}",
              f"{found['cpu'] * scale:.1f}",
              f"{found['seconds'] * scale:.1f}",
              f"{found['bytes'] / 1e6:.0f} ({found['peak'] / 1e6:.0f})",
              f"{found['open']:.3f}",
          )
      )
  print(
      f"Plans of {num_tokens:,} tokens, {found['documents']:,} documents, {_FILES} files in groups"
      f" of {_GROUP}.\n"
  )
  titles = ("boundaries", "rows", "padding", "CPU ÷ scan's", "time ÷ scan's")
  titles += ("CPU min / 100 B", "minutes / 100 B", "MB (of the process)", "s to open")
  print(figures.table(titles, rows))


def compare_packings(args: argparse.Namespace) -> None:
  """Reads an epoch with each packing, and prints a table."""
  with tempfile.TemporaryDirectory(prefix="maxtext_olmo_bench_") as temporary:
    corpus.make(pathlib.Path(temporary), args.megabytes)
    index = f"{temporary}/index.json"
    run("planned", index, args.length, args.bins)  # finds the documents, and compiles
    found = figures.alternate(
        _PACKINGS, args.repeats, lambda name: run(name, index, args.length, args.bins)
    )
  speeds = {name: figures.median(runs, "rows", "seconds") for name, runs in found.items()}
  rows = []
  for name, runs in found.items():
    padding = f"{1 - figures.median(runs, 'tokens', 'places'):.2%}"
    rows.append(
        (name, f"{runs[0]['rows']:,.0f}", padding, f"{speeds[name] / speeds['first_fit']:.2f}")
    )
  print(f"Rows of {args.length}, {args.bins} packed together, one epoch; {figures.machine()}.\n")
  print(figures.table(("packing", "rows", "padding", "rows/s ÷ first_fit's"), rows))


def main() -> None:
  """Measures packings and plans, and prints tables."""
  parser = argparse.ArgumentParser(description=__doc__)
  add = parser.add_argument
  add("--megabytes", type=int, default=64, help="size of the corpus (default: %(default)s)")
  add("--length", type=int, default=8192, help="tokens of a row (default: %(default)s)")
  add("--bins", type=int, default=512, help="rows packed together (default: %(default)s)")
  add("--repeats", type=int, default=3, help="epochs of each packing (default: %(default)s)")
  add(
      "--plan-tokens", type=int, default=1_000_000_000, help="tokens to plan (default: %(default)s)"
  )
  add("--plan-only", action="store_true", help="leave out the other packings (default: off)")
  add("--plan-here", nargs=3, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.plan_here:
    folder, boundaries, length = args.plan_here
    print(json.dumps(plan_here(pathlib.Path(folder), boundaries, int(length))))
    return
  if not args.plan_only:
    compare_packings(args)
  with tempfile.TemporaryDirectory(prefix="maxtext_olmo_bench_") as temporary:
    plan_rows(pathlib.Path(temporary), args.plan_tokens)


if __name__ == "__main__":
  main()
