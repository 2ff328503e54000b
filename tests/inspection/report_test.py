"""Tests of the report as a file; `browser_test` opens it."""

import base64
import hashlib
import importlib.util
import json
import re

import numpy as np
from absl.testing import absltest

from maxtext_olmo import errors
from maxtext_olmo.inspection import changes as changes_lib
from maxtext_olmo.inspection import losses as losses_lib
from maxtext_olmo.inspection import plan as plan_lib
from maxtext_olmo.inspection import report
from maxtext_olmo.inspection import run_plan
from maxtext_olmo.order import mixture
from maxtext_olmo.order import schedule as schedule_lib
from tests.inspection import pages
from tests.inspection import sources_test
from tests.inspection import spike_section_test

_HAS_BOKEH = importlib.util.find_spec("bokeh") is not None


class ReportTest(absltest.TestCase):

  @absltest.skipIf(_HAS_BOKEH, "Bokeh is installed")
  def test_without_bokeh_the_error_says_what_to_install(self):
    with self.assertRaisesRegex(errors.ConfigError, "pip install bokeh"):
      pages.small_page(self.create_tempdir().full_path)

  @absltest.skipUnless(_HAS_BOKEH, "bokeh not installed; `make test-browser` installs it")
  def test_the_policy_allows_the_scripts_of_the_page_and_nothing_else(self):
    page = pages.small_page(self.create_tempdir().full_path)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    for word in ("unsafe", "http", "*"):
      self.assertNotIn(word, policy)
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    self.assertLen(scripts, 3)
    for script in scripts:
      digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
      self.assertIn(f"&#x27;sha256-{digest}&#x27;", policy)
    self.assertEqual(page.count("attacked"), page.count("dataset.attacked"))
    self.assertNotIn("<script>document", page)
    self.assertNotIn("<img", page)

  @absltest.skipUnless(_HAS_BOKEH, "bokeh not installed; `make test-browser` installs it")
  def test_the_series_in_the_page_are_those_of_the_sources(self):
    directory = self.create_tempdir().full_path
    page = pages.small_page(directory)
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    with run_plan.open_plan(pages.small_run(directory)) as plan:
      counted = plan.count_sources()
    order = [counted.labels.index(label) for label in data["labels"]]
    shares = np.frombuffer(base64.b64decode(data["shares"]), "<f4").reshape(-1, 2)
    epochs = np.frombuffer(base64.b64decode(data["epochs"]), "<f4").reshape(-1, 2)
    self.assertEqual(data["edges"], counted.edges.tolist())
    np.testing.assert_allclose(shares, counted.shares[:, order], rtol=1e-6)
    np.testing.assert_allclose(epochs, counted.epochs[:, order], rtol=1e-6)

  @absltest.skipUnless(_HAS_BOKEH, "bokeh not installed; `make test-browser` installs it")
  def test_the_page_of_a_long_run_of_many_labels_and_rows_stays_small(self):
    index = sources_test.large_index(labels=300)
    stream = mixture.mixture_stream(index, {"*": 1.0}, "epochs", order="feistel", seed=1)
    schedule = schedule_lib.BatchSchedule.constant(512)
    plan = plan_lib.Plan((changes_lib.Stretch(0, 1_400_000, schedule, stream, index),))
    steps = np.arange(0, 1_400_000, 5)
    losses = losses_lib.Losses(steps, np.sin(steps), "loss")
    page = report.make_page(
        plan,
        plan.count_sources(),
        title="t",
        losses=losses,
        findings=spike_section_test.many_findings(spikes=100, text="x&" * 20_000),
    )
    self.assertLess(len(page.encode()), 6_000_000)
    self.assertIn("more characters are not shown", page)


if __name__ == "__main__":
  absltest.main()
