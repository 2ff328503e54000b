"""Tests of the HTML of pages."""

from absl.testing import absltest

from maxtext_olmo.inspection import markup

_LIVE = "<script>alert('&')</script>"


class HtmlTest(absltest.TestCase):

  def test_text_is_escaped_wherever_it_is_put(self):
    pages = [
        markup.paragraph(_LIVE),
        markup.link("step", _LIVE, n=_LIVE),
        markup.table([_LIVE], [[_LIVE]]),
        markup.make_message(_LIVE, _LIVE),
    ]
    for page in pages:
      self.assertNotIn("<script", page)
      self.assertIn("&lt;script&gt;alert(&#x27;&amp;&#x27;)&lt;/script&gt;", page)

  def test_html_is_not_escaped_again(self):
    link = markup.link("step", "step 5", n=5, first=0)
    self.assertEqual(link, '<a href="step?n=5&amp;first=0">step 5</a>')
    self.assertIn(f"<td>{link}</td>", markup.table(["step"], [[link]]))

  def test_only_a_page_that_waits_reloads(self):
    self.assertIn('http-equiv="refresh" content="1"', markup.make_page("t", [], refresh=1))
    self.assertNotIn("refresh", markup.make_page("t", []))

  def test_the_forms_can_be_left_out(self):
    self.assertIn("<form", markup.make_message("t", "text"))
    self.assertNotIn("<form", markup.make_message("t", "text", forms=False))


if __name__ == "__main__":
  absltest.main()
