"""Tests of the bar chart."""

from xml.etree import ElementTree

from absl.testing import absltest

from maxtext_olmo.cli import bench_svg

_SVG = "{http://www.w3.org/2000/svg}"


class BenchSvgTest(absltest.TestCase):

  def _draw(self, *bars, title="a title", heading="a heading"):
    return ElementTree.fromstring(bench_svg.bar_chart(title, "below it", [(heading, bars)]))

  def _widths(self, picture):
    groups = set(bench_svg._COLOURS.values())
    bars = [r for r in picture.iter(f"{_SVG}rect") if r.get("fill") in groups]
    return [float(r.get("width")) for r in bars if r.get("x") == str(bench_svg._LEFT)]

  def test_a_tenth_of_the_rate_is_one_step_of_the_axis_shorter(self):
    values = (5000.0, 500.0, 50.0)
    bars = [bench_svg.Bar(f"{v}", "ours", v, v, v) for v in values]
    long, middle, short = self._widths(self._draw(*bars))
    self.assertAlmostEqual(long - middle, middle - short, delta=0.2)
    self.assertGreater(long, middle)

  def test_the_range_goes_from_the_slowest_to_the_fastest(self):
    picture = self._draw(bench_svg.Bar("a", "peer", 50.0, 20.0, 80.0))
    (line,) = [e for e in picture.iter(f"{_SVG}line") if e.get("class") == "range"]
    (width,) = self._widths(picture)
    end = bench_svg._LEFT + width
    self.assertBetween(end, float(line.get("x1")), float(line.get("x2")))

  def test_all_of_it_lies_within_the_picture(self):
    bars = [bench_svg.Bar(f"loader {i}", "peer", 3.0**i, 2.9**i, 3.1**i) for i in range(8)]
    picture = self._draw(*bars)
    _, _, width, height = map(float, picture.get("viewBox").split())
    for element in picture.iter():
      if element.tag in (f"{_SVG}text", f"{_SVG}rect") and element.get("x"):
        self.assertBetween(float(element.get("x")), 0, width)
        self.assertBetween(float(element.get("y")), 0, height)

  def test_labels_and_values_are_written_and_markup_in_them_is_text(self):
    bars = [
        bench_svg.Bar("<b> & co", "limit", 1234.5, 1000, 1500),
        bench_svg.Bar("slow", "peer", 3.21, 3, 4),
    ]
    picture = self._draw(*bars, title='a "quoted" <title>', heading="filter on & off")
    texts = [e.text for e in picture.iter(f"{_SVG}text")]
    for text in ("<b> & co", "1,234", "3.2", 'a "quoted" <title>', "filter on & off", "10", "1000"):
      self.assertIn(text, texts)
    self.assertEqual(picture.get("aria-label"), 'a "quoted" <title>')


if __name__ == "__main__":
  absltest.main()
