"""Takes the screenshots of the guides (`make screenshots`).

A small model is trained on Python's documentation strings and a document of garbage, which makes
its loss jump; then it resumes with another batch size and skips some steps. The report of
that run, and the pages that `inspect --serve` shows of it, are opened in headless Chromium.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
from typing import Any

_GUIDES = pathlib.Path(__file__).parent / "guides"
_WIDTH, _COLOURS = 1100, 96
_LENGTH, _BATCH, _STEPS = 128, 8, 320
_CONFIG = """\
from configs import tiny


def get_config():
  config = tiny.get_config()
  config.dataset_type = "olmo_grain"
  with config.unlocked():
    config.update({values!r})
  return config
"""


def write_corpus(directory: pathlib.Path) -> dict[str, Any]:
  """Writes a corpus with its index and document index; returns the config of a run over it."""
  from maxtext_olmo.cli import demo
  from maxtext_olmo.corpus import documents as documents_lib
  from maxtext_olmo.corpus import index_builder
  from maxtext_olmo.corpus import manifest
  from maxtext_olmo.corpus import tokenize
  from maxtext_olmo.corpus import tokenizer

  rng = random.Random(1)
  garbage = ["".join(chr(rng.randrange(0x400, 0x500)) for _ in range(270))]  # Four rows.
  texts = {**demo.docstrings(60), "scraped": garbage}
  corpus, tokens = directory / "corpus", tokenizer.ByteTokenizer()
  made = tokenize.make_corpus(texts, corpus, tokens, tokens_per_file=200_000)
  entries = manifest.read_mix(made.mix_file, tokenizer=made.tokenizer)
  index = index_builder.build_index(
      [(entry.path, entry.label) for entry in entries],
      _LENGTH,
      tokenizer=made.tokenizer,
      dtype=made.dtype,
      base=str(corpus.absolute()),
  )
  path = directory / "index.json"
  index.save(str(path))
  documents_lib.build_documents(index, documents_lib.default_path(str(path)), tokens.eos_id)
  return {
      "olmo_index_path": str(path),
      "max_target_length": _LENGTH,
      "vocab_size": made.vocab_size,
      "checkpoint_dir": str(directory / "checkpoints"),
      "metrics_file": str(directory / "metrics.jsonl"),
      "data_shuffle_seed": _late_seed(index, "scraped"),
      "checkpoint_period": 100,
      "log_interval": 100,
  }


def _late_seed(index: Any, label: str) -> int:
  """Returns a seed with which a label comes late, most of it in one batch."""
  import numpy as np

  from maxtext_olmo.order import permutations

  (file,) = (file for file in index.files if file.label == label)
  rows = file.instance_offset + np.arange(file.n_instances)
  count = index.total_instances
  for seed in range(1_000_000):
    order = permutations.make_order("feistel", num_instances=count, seed=seed)
    steps = order.places(0, rows) // _BATCH
    if steps.min() > 120 and np.bincount(steps).max() > 1:
      return seed
  raise RuntimeError("No seed was found.")


def spike_step(directory: pathlib.Path) -> int:
  """Returns the step with the highest loss of a model that has learned something."""
  lines = (directory / "metrics.jsonl").read_text().splitlines()
  logged = [entry for entry in map(json.loads, lines) if entry["step"] > 120]
  return max(logged, key=lambda entry: entry["loss"])["step"]


def train(directory: pathlib.Path) -> None:
  """Trains in two parts, with a change between them; run.py is the config of the second."""
  values = write_corpus(directory)
  config = directory / "run.py"
  for changed in (
      {"steps": 200, "global_batch_size_to_load": _BATCH},
      {"steps": _STEPS, "global_batch_size_to_load": 2 * _BATCH, "olmo_skip": ((210, 220),)},
  ):
    config.write_text(_CONFIG.format(values={**values, **changed}))
    _run("-m", "maxtext_olmo.trainers.tiny", f"--config={config}")


def _run(*arguments: str) -> None:
  environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
  subprocess.run([sys.executable, *arguments], check=True, env=environment)


def save(driver: Any, name: str, height: int) -> None:
  """Saves the top of the page that is open as a small picture."""
  from PIL import Image

  driver.set_window_size(_WIDTH, height)
  # The next frame may still be drawn in the old size.
  driver.execute_async_script(
      "const done = arguments[0]; requestAnimationFrame(() => setTimeout(done, 500))"
  )
  image = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")
  path = _GUIDES / f"{name}.png"
  image.quantize(_COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
  print(f"{path}: {path.stat().st_size / 1000:.0f} KB")


def save_report(driver: Any, config: pathlib.Path) -> None:
  """Saves the report: its plots, and what it says of the first spike and of the changes."""
  from selenium.webdriver.support.ui import WebDriverWait

  page, losses = config.with_name("report.html"), str(config.with_name("metrics.jsonl"))
  command = ("report", str(config), "--losses", losses, "--output", str(page))
  _run("-m", "maxtext_olmo", *command, "--title", "A small run")
  driver.get(page.as_uri())
  drawn = "return document.body.dataset.drawn === 'yes' && Bokeh.documents[0].is_idle"
  WebDriverWait(driver, 60).until(lambda driver: driver.execute_script(drawn))
  save(driver, "report", 1145)
  for name, heading, height in (
      ("report_spike", "Spikes", 887),
      ("report_changes", "Changes", 245),
  ):
    found = driver.execute_script(
        "const heading = [...document.querySelectorAll('h2')].find("
        " (h) => h.textContent.startsWith(arguments[0]));"
        "const spike = document.querySelector('details.spike'); if (spike) spike.open = true;"
        "if (heading) heading.scrollIntoView(); return Boolean(heading)",
        heading,
    )
    if found:
      save(driver, name, height)


def save_served(driver: Any, config: pathlib.Path) -> None:
  """Saves pages of the run as `inspect --serve` shows them."""
  command = [sys.executable, "-m", "maxtext_olmo", "inspect", str(config), "--serve"]
  environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
    try:
      _, address = (server.stdout.readline().strip() for _ in range(2))  # type: ignore
      driver.get(f"{address}step?n={spike_step(config.parent)}")
      save(driver, "inspect_step", 766)
      driver.find_element("xpath", "//tr[td='scraped']/td/a").click()
      save(driver, "inspect_row", 570)
    finally:
      server.terminate()


def main() -> None:
  """Takes all screenshots."""
  from tests.inspection import chromium

  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--keep", type=pathlib.Path, help="keep the run here, and use it again")
  args = parser.parse_args()
  with tempfile.TemporaryDirectory(prefix="small_run_") as temporary:
    directory = args.keep or pathlib.Path(temporary)
    directory.mkdir(parents=True, exist_ok=True)
    config = directory / "run.py"
    if not (directory / "checkpoints" / f"{_STEPS - 1}").exists():
      train(directory)
    with chromium.open_browser(_WIDTH, 1000) as driver:
      chromium.prefer(driver, "light")
      save_served(driver, config)
      save_report(driver, config)


if __name__ == "__main__":
  main()
