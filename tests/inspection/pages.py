"""A report of a small run, for tests: two labels, a change, a spike, and rows of live HTML."""

import importlib.util
import shutil

import numpy as np

from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.inspection import losses as losses_lib
from maxtext_olmo.inspection import plan as plan_lib
from maxtext_olmo.inspection import report
from maxtext_olmo.inspection import sources
from maxtext_olmo.order import mixture
from maxtext_olmo.order import schedule as schedule_lib
from tests import corpora

PEAK = 60
TEXT = (
    "</pre><script>document.body.dataset.attacked = 'yes'</script>"
    '<img src="http://127.0.0.1:9/x.png" onerror="document.body.dataset.attacked = \'yes\'">'
    "\n]]></script><!-- & &lt; \u202e end"
)
LABEL = 'label-1"><script>document.body.dataset.attacked = 1</script>'


def why_not() -> str:
  """Returns why no report can be opened in a browser here; empty if it can."""
  packages = [name for name in ("bokeh", "selenium") if importlib.util.find_spec(name) is None]
  programs = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
  missing = ", ".join([*packages, *programs])
  return f"{missing} not installed; `make test-browser` installs them" if missing else ""


def small_plan(directory: str) -> plan_lib.Plan:
  """Returns the plan of a run of 100 steps, of which 70 are done."""
  path, _ = corpora.write_corpus(directory, tokens_per_file=(400, 160, 80, 320))
  index = index_lib.load_index(path)
  weights = {"label-0": 3.0, "label-1": 1.0}
  stream = mixture.mixture_stream(index, weights, "weights", order="feistel", seed=1)
  schedule = schedule_lib.BatchSchedule(((0, 4), (50, 8)))
  return plan_lib.Plan((sources.Stretch(0, 100, schedule, stream, index),), step=70)


def small_page(directory: str) -> str:
  """Returns the report of that run."""
  plan = small_plan(directory)
  steps = np.arange(70)
  values = 2 + 0.01 * np.sin(steps)
  values[PEAK] = 7
  losses = losses_lib.Losses(steps, values, "loss")
  row = report.ShownRow(PEAK, 3, LABEL, "/data/<b>.npy", 32_768, 65_536, TEXT, "all repeated")
  return report.make_page(
      plan,
      plan.count_sources(),
      title="A <small> run",
      losses=losses,
      spikes=losses_lib.find_spikes(losses),
      rows={PEAK: [row]},
  )
