"""A report of a small run, for tests: two labels, changes, a spike, and rows of live HTML."""

import dataclasses
import importlib.util
import json
import pathlib
import shutil

import numpy as np

from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.corpus import tokenizer as tokenizer_lib
from maxtext_olmo.inspection import losses as losses_lib
from maxtext_olmo.inspection import report
from maxtext_olmo.inspection import run as run_lib
from maxtext_olmo.inspection import run_plan
from maxtext_olmo.inspection import spikes

STEPS, DONE = 100, 70
TEXT = (
    "</pre><script>document.body.dataset.attacked = 'yes'</script>"
    '<img src="http://127.0.0.1:9/x.png" onerror="document.body.dataset.attacked = \'yes\'">'
    "\n]]></script><!-- & &lt; end "
)
LABEL = 'label-1"><script>document.body.dataset.attacked = 1</script>'
_LENGTH = 256
_ROWS = 200  # of each label
_BAD_ROW = 17


def why_not() -> str:
  """Returns why no report can be opened in a browser here; empty if it can."""
  packages = [name for name in ("bokeh", "selenium") if importlib.util.find_spec(name) is None]
  programs = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
  missing = ", ".join([*packages, *programs])
  return f"{missing} not installed; `make test-browser` installs them" if missing else ""


def small_run(directory: str) -> run_lib.Run:
  """Returns a run whose corpus has one row of live HTML, under a label that is live HTML too."""
  root = pathlib.Path(directory)
  root.mkdir(parents=True, exist_ok=True)
  rng = np.random.Generator(np.random.PCG64(0))
  entries = []
  for number, label in enumerate(("label-0", LABEL)):
    tokens = rng.choice(np.frombuffer(b"etaoin shrdlu ", np.uint8), (_ROWS, _LENGTH))
    if number:
      html = tokenizer_lib.ByteTokenizer().encode([TEXT])[0]
      tokens[_BAD_ROW] = np.resize(html, _LENGTH)
    path = root / f"<b>{number}.npy"
    tokens.astype("<u2").tofile(path)
    entries.append((str(path), label))
  index = index_lib.build_index(entries, _LENGTH, tokenizer="bytes", dtype="uint16", base=directory)
  index.save(str(root / "index.json"))
  config = {
      "olmo_index_path": str(root / "index.json"),
      "max_target_length": _LENGTH,
      "global_batch_size_to_load": 4,
      "vocab_size": 258,
      "olmo_batch_schedule": ((0, 2), (50, 4)),
      "data_shuffle_seed": 2,
  }
  (root / "config.json").write_text(json.dumps(config | {"steps": STEPS}))
  return run_lib.run_of_config(str(root / "config.json"), config, steps=STEPS)


def find_peak(run: run_lib.Run) -> tuple[int, int]:
  """Returns the step and the row of live HTML."""
  with run_lib.open_iterator(run) as iterator:
    places = (
        (step, row)
        for step in range(DONE)
        for row, number in enumerate(iterator.row_numbers(step).tolist())
        if number == _ROWS + _BAD_ROW
    )
    return next(places)


def write_losses(path: pathlib.Path, peak: int) -> None:
  """Writes losses that jump at a step."""
  values = 2 + 0.01 * np.sin(np.arange(DONE))
  values[peak] = 7
  lines = [json.dumps({"step": i, "loss": value}) for i, value in enumerate(values.tolist())]
  path.write_text("\n".join(lines))


def small_page(directory: str) -> str:
  """Returns the report of that run, as if `DONE` of its steps were done."""
  run = small_run(directory)
  log = pathlib.Path(directory) / "metrics.jsonl"
  write_losses(log, find_peak(run)[0])
  losses = losses_lib.read_losses(str(log))
  with run_lib.open_iterator(run) as iterator:
    findings = spikes.examine(iterator, losses, tokenizer=tokenizer_lib.ByteTokenizer())
  with run_plan.open_plan(run) as plan:
    plan = dataclasses.replace(plan, step=DONE)
    sources = plan.count_sources()
    return report.make_page(plan, sources, title="A <small> run", losses=losses, findings=findings)
