"""Padding and speed of the packings of documents, as `dataset_type=olmo_documents` delivers them.

Each packing reads one epoch of the same documents (lognormal lengths, 400 tokens in the median) in
batches of 32 rows, up to arrays on devices. The packings take turns.
"""

import argparse
import pathlib
import tempfile
import time

import jax
import numpy as np

import maxtext_olmo
from tests.benchmarks import corpus
from tests.benchmarks import figures

_PACKINGS = ("first_fit", "best_fit", "concat_then_split", "planned")
_BATCH = 32


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


def main() -> None:
  """Measures all packings and prints a table."""
  parser = argparse.ArgumentParser(description=__doc__)
  add = parser.add_argument
  add("--megabytes", type=int, default=64, help="size of the corpus (default: %(default)s)")
  add("--length", type=int, default=8192, help="tokens of a row (default: %(default)s)")
  add("--bins", type=int, default=512, help="rows packed together (default: %(default)s)")
  add("--repeats", type=int, default=3, help="epochs of each packing (default: %(default)s)")
  args = parser.parse_args()
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


if __name__ == "__main__":
  main()
