"""Tests of the served pages in headless Chromium."""

import json
import tempfile
import threading
import urllib.parse

from absl.testing import absltest

from maxtext_olmo.corpus import tokenizer as tokenizer_lib
from maxtext_olmo.inspection import run as run_lib
from maxtext_olmo.inspection import serve
from maxtext_olmo.inspection import views
from tests.inspection import chromium
from tests.inspection import pages
from tests.inspection import small_run
from tests.loader import cases

STARTS_PROCESSES = True

_WAIT = 60


@absltest.skipIf(pages.why_not(), pages.why_not())
class ServeBrowserTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cases.compile_fast()
    directory = cls.enterClassContext(tempfile.TemporaryDirectory(prefix="serve_browser_test_"))
    made = small_run.write(directory, documents=small_run.hostile_texts())
    run = run_lib.find_run(made.checkpoints)
    cls.iterator = cls.enterClassContext(run_lib.open_iterator(run))
    tokenizer = tokenizer_lib.ByteTokenizer()
    cls.server = cls.enterClassContext(serve.Server(views.Views(run, cls.iterator, tokenizer)))
    thread = threading.Thread(target=cls.server.serve_forever)
    thread.start()
    cls.addClassCleanup(thread.join)
    cls.addClassCleanup(cls.server.shutdown)
    cls.driver = cls.enterClassContext(chromium.open_browser())

  def setUp(self):
    super().setUp()
    for log in ("browser", "performance"):
      self.driver.get_log(log)  # What an earlier test has left there.
    self.driver.get(self.server.address)

  def submit(self, action, **values):
    """Fills in a form, sends it, and waits for the page."""
    from selenium.webdriver.support.ui import WebDriverWait

    form = self.driver.find_element("css selector", f"form[action={action}]")
    for name, value in values.items():
      form.find_element("name", name).send_keys(str(value))
    form.submit()
    WebDriverWait(self.driver, _WAIT).until(
        lambda driver: urllib.parse.urlsplit(driver.current_url).path.endswith(f"/{action}")
        and not driver.find_elements("tag name", "progress")
    )

  def title(self):
    return self.driver.find_element("tag name", "h1").text

  def test_a_step_is_asked_for_and_walked_from(self):
    self.submit("step", n=7)
    self.assertEqual(self.title(), "Step 7")
    self.driver.find_element("link text", "next step →").click()
    self.assertEqual(self.title(), "Step 8")
    self.driver.find_element("css selector", "tbody a").click()
    self.assertEqual(self.title(), "Step 8, row 0")
    self.driver.find_element("link text", "next row →").click()
    self.assertEqual(self.title(), "Step 8, row 1")

  def test_live_html_is_shown_as_text_and_nothing_else_is_asked_for(self):
    self.submit("find", text="</pre><script>")
    self.assertIn("40 occurrences", self.driver.find_element("tag name", "body").text)
    self.driver.find_element("css selector", "tbody a").click()
    texts = self.driver.find_elements("css selector", "pre")
    self.assertTrue(any("script>" in text.text for text in texts))
    attacked = "return document.body.dataset.attacked"
    self.assertIsNone(self.driver.execute_script(attacked))
    self.assertEqual(self.driver.execute_script("return document.images.length"), 0)
    messages = [json.loads(e["message"])["message"] for e in self.driver.get_log("performance")]
    asked = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    urls = [params["request"]["url"] for params in asked]
    self.assertNotEmpty(urls)
    for url in urls:
      if not url.endswith("/favicon.ico"):
        self.assertStartsWith(url, self.server.address)
    bad = [e for e in self.driver.get_log("browser") if "favicon" not in e["message"]]
    self.assertEmpty(bad)

  def test_the_policy_stops_scripts_and_other_styles(self):
    self.driver.execute_script(
        "document.body.insertAdjacentHTML('beforeend',"
        ' \'<img src=x onerror="document.body.dataset.attacked = 1"><p style="color: red">\');'
        "const script = document.createElement('script');"
        "script.textContent = 'document.body.dataset.attacked = 2'; document.body.append(script)"
    )
    self.assertIsNone(self.driver.execute_script("return document.body.dataset.attacked"))
    said = " ".join(entry["message"] for entry in self.driver.get_log("browser"))
    self.assertIn("Content Security Policy", said)

  def test_its_own_style_is_allowed_and_follows_the_scheme(self):
    ground = "return getComputedStyle(document.body).backgroundColor"
    chromium.prefer(self.driver, "light")
    self.assertEqual(self.driver.execute_script(ground), "rgb(255, 255, 255)")
    chromium.prefer(self.driver, "dark")
    self.assertEqual(self.driver.execute_script(ground), "rgb(22, 24, 28)")

  def test_an_error_keeps_the_forms(self):
    self.submit("document", id="x")
    self.assertIn(
        "no document has this number or name", self.driver.find_element("tag name", "body").text
    )
    self.submit("step", n=3)
    self.assertEqual(self.title(), "Step 3")


if __name__ == "__main__":
  absltest.main()
