"""The pictures of the guides."""

import collections
import pathlib
import tomllib
import xml.etree.ElementTree as ET

from absl.testing import absltest

from docs import pictures

_ROOT = pathlib.Path(__file__).resolve().parent.parent


class PackingsTest(absltest.TestCase):

  def test_every_packing_shows_every_token_once(self):
    made = pictures.panels(20, 256)
    self.assertLen(made, 5)
    counts = []
    for panel in made:
      counter = collections.Counter(cell for row in panel.rows for cell in row)
      del counter[0]
      counts.append(counter)
    for counter in counts:
      self.assertEqual(counter, counts[0])
    self.assertLen(counts[0], 20)

  def test_the_file_is_an_svg_with_a_line_of_text_per_panel(self):
    drawn = ET.fromstring(pictures.draw_packings(10, 64))
    texts = [e.text for e in drawn.iter("{http://www.w3.org/2000/svg}text")]
    self.assertLen(texts, 6)
    self.assertIn("planned", texts[-1])

  def test_the_picture_of_the_guide_is_what_the_command_draws(self):
    drawn = (_ROOT / "docs" / "guides" / "packed_rows.svg").read_text()
    self.assertEqual(drawn, pictures.draw_packings(48, 1024))


class DesignTest(absltest.TestCase):

  def test_the_picture_of_the_guide_is_what_the_command_draws(self):
    drawn = (_ROOT / "docs" / "guides" / "design.svg").read_text()
    self.assertEqual(drawn, pictures.draw_design())

  def test_the_rooms_are_named_in_the_order_that_imports_follow(self):
    contract = tomllib.loads((_ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = [layer.replace("maxtext_olmo.", "") for layer in contract["contracts"][0]["layers"]]
    rooms = [name for name in reversed(layers) if "config" not in name and name != "input_pipeline"]
    rooms = [name.replace(" | ", ", ") for name in rooms]  # Side by side.
    texts = [e.text for e in ET.fromstring(pictures.draw_design()).iter() if e.text]
    self.assertTrue(any(" → ".join(rooms) in text for text in texts), rooms)


class SourcesTest(absltest.TestCase):

  def test_the_picture_of_the_readme_is_what_the_command_draws(self):
    drawn = (_ROOT / "docs" / "guides" / "sources.svg").read_text()
    self.assertEqual(drawn, pictures.draw_sources())

  def test_it_names_every_label_and_the_change_of_the_mixture(self):
    texts = " ".join(e.text for e in ET.fromstring(pictures.draw_sources()).iter() if e.text)
    for word in (*pictures._LABELS, "mixture"):
      self.assertIn(word, texts)


if __name__ == "__main__":
  absltest.main()
