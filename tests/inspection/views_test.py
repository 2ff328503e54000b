"""Tests of the pages about a run."""

import html.parser
import re
import tempfile
import unittest

from absl.testing import absltest

from maxtext_olmo import errors
from maxtext_olmo.corpus import tokenizer as tokenizer_lib
from maxtext_olmo.inspection import run as run_lib
from maxtext_olmo.inspection import text as text_lib
from maxtext_olmo.inspection import views
from tests.inspection import small_run
from tests.loader import cases

_run: small_run.SmallRun


def setUpModule():
  global _run
  cases.compile_fast()
  directory = tempfile.TemporaryDirectory(prefix="views_test_")
  unittest.addModuleCleanup(directory.cleanup)
  _run = small_run.write(directory.name, documents=small_run.hostile_texts())
  many = dict.fromkeys([*range(9, 17), *range(18, 35)], "many")
  small_run.write_names(_run, {**small_run.NAMES, 8: "<script>", **many})


class _Reader(html.parser.HTMLParser):
  """Collects the elements of a page, its links, and the text of its <pre> elements."""

  def __init__(self, page):
    super().__init__()
    self.elements, self.links, self.texts, self._inside = set(), [], [], []
    self.feed(page)

  def handle_starttag(self, tag, attrs):
    self.elements.add(tag)
    self._inside.append(tag)
    if tag == "a":
      self.links.append(dict(attrs)["href"])
    if tag == "pre":
      self.texts.append("")

  def handle_endtag(self, tag):
    while self._inside and self._inside.pop() != tag:
      pass

  def handle_data(self, data):
    if "pre" in self._inside:
      self.texts[-1] += data


class _Recorder:
  """An iterator that records which rows it is asked to explain."""

  def __init__(self, iterator):
    self._iterator, self.explained = iterator, []

  def __getattr__(self, name):
    return getattr(self._iterator, name)

  def explain(self, step, rows=None):
    explanation = self._iterator.explain(step, rows)
    self.explained += [(step, row.row) for row in explanation.rows]
    return explanation


class ViewsTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    run = run_lib.find_run(_run.checkpoints)
    self.iterator = self.enter_context(run_lib.open_iterator(run))
    self.views = views.Views(run, self.iterator, tokenizer_lib.ByteTokenizer())
    self.addCleanup(self.views.searches.close)
    self.silent = views.Views(run, self.iterator)

  def page(self, page, **query):
    return self.views.page(page, {key: str(value) for key, value in query.items()})

  def test_the_first_page_summarizes_the_state(self):
    page = self.page("")
    self.assertIn("15 steps, 60 samples", page)
    self.assertIn("step?n=14", _Reader(page).links)

  def test_a_step_links_to_its_rows_and_neighbours(self):
    page = self.page("step", n=7)
    links = _Reader(page).links
    self.assertContainsSubset(["step?n=6", "step?n=8"], links)
    self.assertContainsSubset([f"row?step=7&row={row}" for row in range(6)], links)
    self.assertIn("Seen: 6 rows of 32 tokens from position 32", page)
    self.assertIn("To come: 2 rows", self.page("step", n="1,000"))
    self.assertNotIn("step?n=-1", self.page("step", n=0))

  def test_only_the_rows_on_the_page_are_read(self):
    recorder = _Recorder(self.iterator)
    pages = views.Views(run_lib.find_run(_run.checkpoints), recorder)
    page = pages.page("row", {"step": "7", "row": "2"})
    self.assertEqual(recorder.explained, [(7, 2)])
    links = _Reader(page).links
    self.assertContainsSubset(["row?step=7&row=1", "row?step=7&row=3"], links)
    self.assertNotIn("row?step=7&row=6", _Reader(self.page("row", step=7, row=5)).links)
    recorder.explained.clear()
    page = pages.page("step", {"n": "7", "first": "4"})
    self.assertEqual(recorder.explained, [(7, 4), (7, 5)])
    self.assertIn("Seen: 6 rows of 32 tokens from position 32", page)
    self.assertIn("Rows 4 to 5 by label", page)

  def test_a_row_that_the_step_does_not_have_is_an_error(self):
    for page, query in (("row", {"step": 7, "row": 6}), ("step", {"n": 7, "first": 6})):
      with self.assertRaisesRegex(
          errors.OrderError, "Step 7 has rows 0 to 5, so there is no row 6"
      ):
        self.page(page, **query)

  def test_a_row_shows_the_text_that_the_trainer_was_fed_as_text(self):
    shown = ""
    for step in range(15):
      for row in self.iterator.explain(step).rows:
        page = _Reader(self.page("row", step=step, row=row.row))
        texts = [text for _, text in text_lib.pieces(row, tokenizer_lib.ByteTokenizer())]
        self.assertEqual(page.texts, texts)
        self.assertNoCommonElements(page.elements, ["script", "img"])
        shown += "".join(texts)
    self.assertIn("<script>", shown)

  def test_a_step_shows_live_html_as_text(self):
    for step in range(5):
      self.assertNoCommonElements(_Reader(self.page("step", n=step)).elements, ["script", "img"])

  def test_documents_bytes_and_ranges_show_their_steps(self):
    page = self.page("document", id=50)
    self.assertIn("document 50", page)
    step, row = re.search(r"row\?step=(\d+)&amp;row=(\d+)", page).groups()
    self.assertIn("document 50", self.page("row", step=step, row=row))
    self.assertIn("to come", self.page("file", name="web.npy", byte=100))
    self.assertIn("Tokens 3 to 7", self.page("range", file=0, first=3, count=5))

  def test_a_document_is_found_by_its_name(self):
    page = self.page("document", id=" web-17 ")
    self.assertIn("Document web-17", page)
    self.assertIn("document 57 (web-17)", page)
    self.assertIn("document 57 (web-17)", self.page("document", id=57))
    shared = self.page("document", id="shared")
    self.assertIn("Document shared: 2 documents", shared)
    for number in (45, 46):
      self.assertIn(f"document {number} (shared)", shared)
    hostile = self.page("document", id="<script>")
    self.assertIn("(&lt;script&gt;)", hostile)
    self.assertNotIn("script", _Reader(hostile).elements)
    self.assertNotIn('name="id" inputmode', page)

  def test_many_documents_of_one_name_are_links(self):
    page = self.page("document", id="many")
    self.assertLen([link for link in _Reader(page).links if link.startswith("range?")], 5)

  def test_a_search_shows_its_progress_and_then_what_it_found(self):
    self.page("find", text="</pre><script>")
    self.views.searches.get("</pre><script>").wait()
    page = self.page("find", text="</pre><script>")
    self.assertNotIn("http-equiv", page)
    self.assertIn("40 occurrences", page)
    reader = _Reader(page)
    self.assertNoCommonElements(reader.elements, ["script", "img"])
    self.assertLen([link for link in reader.links if link.startswith("range?")], 20)

  def test_without_a_tokenizer_there_are_documents_but_no_text(self):
    page = self.silent.page("row", {"step": "3", "row": "1"})
    self.assertIn("Text needs --tokenizer", page)
    self.assertIn("document ", page)
    self.assertIn("row?step=3", self.silent.page("step", {"n": "3"}))
    with self.assertRaisesRegex(errors.ConfigError, "needs the tokenizer"):
      self.silent.page("find", {"text": "a"})

  def test_what_cannot_be_shown_is_an_error(self):
    for name, query, message in (
        ("step", {"n": "x"}, "n must be a whole number"),
        ("step", {"n": "-1"}, "n must be a whole number"),
        ("step", {"n": "٣"}, "n must be a whole number"),
        ("step", {}, "n must be a whole number"),
        ("row", {"step": 1, "row": 4}, "has rows 0 to 3"),
        ("document", {"id": 10**6}, "no document has this number or name"),
        ("document", {"id": "web-99"}, "no document has this number or name"),
        ("document", {}, "no document has this number or name"),
        ("file", {"name": "x", "byte": 1}, "matches no file"),
        ("range", {"file": 9, "first": 0, "count": 1}, "no such range"),
        ("range", {"file": 0, "first": 0, "count": 0}, "no such range"),
        ("find", {"text": ""}, "some text"),
        ("elsewhere", {}, "There is no page 'elsewhere'"),
    ):
      with self.assertRaisesRegex(errors.MaxtextOlmoError, message):
        self.page(name, **query)

  def test_excluded_rows_are_not_shown_as_kept(self):
    run = run_lib.Run("a", {**_run.config, "checkpoint_dir": ""})
    path = self.create_tempfile("exclude.jsonl", '{"rows": [0, 1]}\n{"document": 50}\n').full_path
    run = run_lib.Run("a", {**run.config, "olmo_exclude": path})
    with run_lib.open_iterator(run) as iterator:
      pages = views.Views(run, iterator)
      page = pages.page("file", {"name": "wiki.npy", "byte": "0"})
      self.assertIn('<span class="masked">EXCLUDED</span>', page)
      step, row = re.search(r"row\?step=(\d+)&amp;row=(\d+)", page).groups()
      self.assertIn(">EXCLUDED<", pages.page("step", {"n": step}))
      self.assertIn(">EXCLUDED<", pages.page("row", {"step": step, "row": row}))
      partly = pages.page("document", {"id": "50"})
      self.assertIn(">EXCLUDED<", partly)
      steps = re.findall(r"row\?step=(\d+)&amp;row=(\d+)", partly)
      told = [pages.page("row", {"step": step, "row": row}) for step, row in steps]
      self.assertTrue(any(re.search(r"kept except \d+ excluded tokens", page) for page in told))

  def test_rows_of_a_later_stage_say_so(self):
    run = run_lib.find_run(_run.checkpoints)
    first = self.iterator.step + 1
    stages = ({"from_step": first, "data_shuffle_seed": 99},)
    run = run_lib.find_run(_run.checkpoints, config={**run.config, "olmo_stages": stages})
    with run_lib.open_iterator(run) as iterator:
      pages = views.Views(run, iterator)
      self.assertIn("0 (stage 1)", pages.page("step", {"n": f"{first}"}))
      self.assertIn("0 (stage 1)", pages.page("row", {"step": f"{first}", "row": "0"}))
      self.assertNotIn("(stage", pages.page("step", {"n": f"{first - 1}"}))


if __name__ == "__main__":
  absltest.main()
