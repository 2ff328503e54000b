"""Tests of the picture of a run's sources."""

import xml.etree.ElementTree as ET

import numpy as np
from absl.testing import absltest

from maxtext_olmo.inspection import changes as changes_lib
from maxtext_olmo.inspection import picture
from maxtext_olmo.inspection import sources


def _sources(labels):
  edges = np.array([0, 10, 20])
  tokens = np.ones((2, len(labels))) * 100
  return sources.Sources(
      labels=tuple(labels),
      available=np.full(len(labels), 400.0),
      edges=edges,
      tokens=tokens,
      seen=np.concatenate([np.zeros((1, len(labels))), np.cumsum(tokens, axis=0)]),
      rows=edges,
      complete=(None,) * len(labels),
      exact=True,
      error=0.0,
  )


def _elements(svg, name):
  return ET.fromstring(svg).findall(f".//{{http://www.w3.org/2000/svg}}{name}")


class PictureTest(absltest.TestCase):

  def test_each_label_has_an_area_a_line_and_its_name(self):
    svg = picture.draw_svg(_sources(["web", "<code>"]), [changes_lib.Change(5, "a & b")], step=7)
    self.assertLen(_elements(svg, "polygon"), 2)
    self.assertLen(_elements(svg, "polyline"), 2)
    said = [element.text for element in _elements(svg, "title")]
    self.assertContainsSubset({"step 5: a & b", "now: step 7", "<code>: 0.500 epochs"}, said)

  def test_areas_fill_the_panel(self):
    areas = _elements(picture.draw_svg(_sources("abc")), "polygon")
    heights = []
    for area in areas:
      y = [float(point.split(",")[1]) for point in area.get("points").split()]
      heights.append(max(y) - min(y))
    np.testing.assert_allclose(sum(heights), 260, atol=0.5)

  def test_labels_beyond_the_largest_are_drawn_together(self):
    svg = picture.draw_svg(_sources([f"label-{i}" for i in range(60)]))
    self.assertLen(_elements(svg, "polygon"), 25)
    self.assertIn("36 other labels", svg)


if __name__ == "__main__":
  absltest.main()
