"""Tests of the report in headless Chromium; SCREENSHOTS=DIR also saves what it looks like."""

import io
import json
import os
import pathlib

from absl.testing import absltest

from maxtext_olmo.corpus import stats
from maxtext_olmo.inspection import picture
from maxtext_olmo.inspection import stats_page
from tests.inspection import chromium
from tests.inspection import pages
from tests.inspection import stats_page_test

STARTS_PROCESSES = True

_WAIT = 60


def _rgb(colour):
  return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))


@absltest.skipIf(pages.why_not(), pages.why_not())
class BrowserTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.driver = cls.enterClassContext(chromium.open_browser())
    cls.directory = pathlib.Path(absltest.get_default_test_tmpdir()) / "report"
    cls.page = cls.directory / "report.html"
    cls.directory.mkdir(parents=True, exist_ok=True)
    cls.page.write_text(pages.small_page(str(cls.directory)))

  def setUp(self):
    super().setUp()
    for log in ("browser", "performance"):
      self.driver.get_log(log)  # What an earlier test has left there.
    self.open_page("light")

  def open_page(self, scheme, page=None):
    from selenium.webdriver.support.ui import WebDriverWait

    chromium.prefer(self.driver, scheme)
    self.driver.get((page or self.page).as_uri())
    drawn = "return document.body.dataset.drawn === 'yes' && Bokeh.documents[0].is_idle"
    WebDriverWait(self.driver, _WAIT).until(lambda driver: driver.execute_script(drawn))

  def run_script(self, script):
    return self.driver.execute_script(script)

  def press(self, *keys):
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(self.driver).send_keys(*keys).perform()

  def colours(self):
    """Returns how many pixels of the plots have each colour, after the next frame is drawn."""
    from PIL import Image

    script = "const done = arguments[0]; requestAnimationFrame(() => setTimeout(done, 300))"
    self.driver.execute_async_script(script)
    png = self.driver.find_element("id", "plots").screenshot_as_png
    image = Image.open(io.BytesIO(png)).convert("RGB")
    return {colour: count for count, colour in image.getcolors(1 << 24)}

  def test_the_page_draws_and_makes_no_request(self):
    colours = self.colours()
    for colour in picture.COLOURS[:2]:
      self.assertGreater(colours.get(_rgb(colour), 0), 5_000, colour)
    self.assert_quiet(self.page)

  def assert_quiet(self, page):
    """Checks that a page has made no request, and that the browser has nothing to complain of."""
    messages = [json.loads(e["message"])["message"] for e in self.driver.get_log("performance")]
    asked = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    urls = {params["request"]["url"] for params in asked}
    self.assertEqual({u for u in urls if not u.startswith("data:")} - {page.as_uri()}, set())
    bad = [e for e in self.driver.get_log("browser") if e["level"] in ("SEVERE", "WARNING")]
    self.assertEmpty(bad, bad)

  def test_the_page_of_statistics_draws_filters_and_makes_no_request(self):
    labels = [stats_page_test.make_stats(name) for name in ("web", pages.LABEL)]
    page = self.directory / "stats.html"
    page.write_text(stats_page.make_page(labels, stats.add_up(labels), title="Statistics"))
    self.driver.get_log("performance")
    self.open_page("light", page)
    colours = self.colours()
    self.assertGreater(colours.get(_rgb(picture.COLOURS[1]), 0), 100)
    self.assert_quiet(page)
    self.assertIsNone(self.run_script("return document.body.dataset.attacked"))
    self.run_script(
        "const box = document.getElementById('filter'); box.value = 'WEB';"
        "box.dispatchEvent(new Event('input'))"
    )
    visible = (
        "return [...document.querySelectorAll('tr[data-label]')]"
        ".filter((r) => !r.hidden).map((r) => r.dataset.label)"
    )
    self.assertEqual(self.run_script(visible), ["web"])

  @absltest.skipUnless(os.environ.get("SCREENSHOTS"), "SCREENSHOTS names no directory")
  def test_screenshots_are_saved(self):
    target = pathlib.Path(os.environ["SCREENSHOTS"])
    for scheme in ("light", "dark"):
      self.open_page(scheme)
      self.colours()
      self.driver.save_screenshot(str(target / f"{scheme}.png"))

  def test_text_of_a_corpus_is_text(self):
    shown = self.run_script("return document.querySelector('pre').textContent")
    self.assertStartsWith(shown, pages.TEXT)
    self.assertIsNone(self.run_script("return document.body.dataset.attacked"))
    self.assertEqual(self.run_script("return document.images.length"), 0)
    where = self.run_script("return document.querySelector('.where').textContent")
    self.assertRegex(where, r"/<b>1\.npy, bytes 8,704 to 9,216$")

  def test_the_policy_stops_scripts_styles_and_requests(self):
    self.run_script(
        "const script = document.createElement('script');"
        "script.textContent = \"document.body.dataset.attacked = 'yes'\";"
        "document.body.append(script);"
        "document.body.insertAdjacentHTML('beforeend',"
        " '<img src=x onerror=\"document.body.dataset.attacked = 1\">')"
    )
    script = "const done = arguments[0]; fetch('http://127.0.0.1:9/').catch((e) => done(`${e}`))"
    self.assertIn("TypeError", self.driver.execute_async_script(script))
    self.assertIsNone(self.run_script("return document.body.dataset.attacked"))
    said = " ".join(entry["message"] for entry in self.driver.get_log("browser"))
    self.assertIn("Content Security Policy", said)

  def test_the_filter_leaves_what_it_names(self):
    self.press("/")
    self.press("label-0")
    visible = (
        "return [...document.querySelectorAll('#sources tbody tr')].filter((r) => !r.hidden)"
        ".map((r) => r.dataset.label)"
    )
    self.assertEqual(self.run_script(visible), ["label-0"])
    rows = "return [...document.querySelectorAll('.row')].map((r) => r.hidden)"
    self.assertEqual(self.run_script(rows), [True])
    self.assertEqual(
        self.run_script("return document.getElementById('count').textContent"), "1 of 2 labels"
    )
    colours = self.colours()
    self.assertLess(colours.get(_rgb(picture.COLOURS[0]), 0), 2_000)  # The line of the loss.
    self.assertGreater(colours.get(_rgb(picture.COLOURS[1]), 0), 5_000)

  def test_a_link_leads_to_its_row_and_opens_its_spike(self):
    self.run_script("document.querySelector('details.spike').open = false")
    self.driver.find_element("css selector", "td a").click()
    self.assertTrue(self.run_script("return document.querySelector('details.spike').open"))
    self.assertIn("#s64r2", self.driver.current_url)

  def test_a_narrow_page_has_no_horizontal_scroll_bar(self):
    self.driver.set_window_size(500, 1200)
    self.addCleanup(self.driver.set_window_size, 1200, 1600)
    self.open_page("light")
    overflow = "const d = document.documentElement; return d.scrollWidth - d.clientWidth"
    self.assertLessEqual(self.run_script(overflow), 0)

  def test_keys_read_steps_zoom_and_open_spikes(self):
    from selenium.webdriver.common.keys import Keys

    self.press(Keys.ARROW_RIGHT)
    self.press(Keys.ARROW_RIGHT)
    readout = self.run_script("return document.getElementById('readout').textContent")
    self.assertRegex(readout, r"^Step 1: label-\d\S* .*\d+\.\d\d % \(\d\.\d{3} ep\.\)")
    self.assertRegex(readout, r"step 1: loss 2\.008$")
    width = (
        "const range = Bokeh.documents[0].roots()[0].children[0].x_range;"
        "return range.end - range.start"
    )
    for key, expected in (("+", 50), ("+", 25), ("-", 50), ("0", 100)):
      self.press(key)
      self.assertAlmostEqual(self.run_script(width), expected)
    self.run_script("document.querySelector('details.spike').open = false")
    self.press("n")
    readout = self.run_script("return document.getElementById('readout').textContent")
    self.assertIn("step 64: loss 7.000", readout)
    self.assertTrue(self.run_script("return document.querySelector('details.spike').open"))

  def test_pointing_at_a_plot_reads_the_step_there(self):
    from selenium.webdriver.common.action_chains import ActionChains

    plots = self.driver.find_element("id", "plots")
    ActionChains(self.driver).move_to_element_with_offset(plots, 0, -200).perform()
    readout = self.run_script("return document.getElementById('readout').textContent")
    self.assertRegex(readout, r"^Step [45]\d: ")

  def test_the_page_follows_the_scheme_of_the_system(self):
    self.assertGreater(self.colours().get((255, 255, 255), 0), 100_000)
    self.open_page("dark")
    colours = self.colours()
    self.assertGreater(colours.get((22, 24, 28), 0), 100_000)
    self.assertLess(colours.get((255, 255, 255), 0), 1_000)

  def test_a_dark_page_prints_in_light_colours_with_all_text_shown(self):
    script = (
        "const view = [...Bokeh.index.roots][0].child_views[0];"
        "const canvas = view.canvas_view.primary.canvas;"
        "const count = () => { const seen = new Set();"
        " const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, 30);"
        " for (let i = 0; i < data.length; i += 4)"
        "  if (data[i + 3] === 255) seen.add(data.slice(i, i + 3).join());"
        " return seen.has('28,30,33'); };"
    )
    self.open_page("dark")
    self.assertFalse(self.run_script(script + "return count()"))
    self.assertTrue(
        self.run_script(script + "dispatchEvent(new Event('beforeprint')); return count()")
    )
    self.assertTrue(self.run_script("return document.querySelector('details').open"))


if __name__ == "__main__":
  absltest.main()
