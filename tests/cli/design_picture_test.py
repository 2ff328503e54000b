"""The picture of the design guide."""

import os
import pathlib
import tomllib
import xml.etree.ElementTree as ET

from absl.testing import absltest

from maxtext_olmo.cli import design_picture
from maxtext_olmo.cli import main as main_lib

_ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


class DesignPictureTest(absltest.TestCase):

  def test_the_picture_of_the_guide_is_what_the_command_draws(self):
    path = os.path.join(self.create_tempdir().full_path, "a.svg")
    self.assertEqual(main_lib.main(["picture", "--of", "design", "--output", path]), 0)
    drawn = pathlib.Path(path).read_text()
    self.assertEqual((_ROOT / "docs" / "guides" / "design.svg").read_text(), drawn)

  def test_the_rooms_are_named_in_the_order_that_imports_follow(self):
    contract = tomllib.loads((_ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = [layer.removeprefix("maxtext_olmo.") for layer in contract["contracts"][0]["layers"]]
    rooms = [name for name in reversed(layers) if "config" not in name and name != "input_pipeline"]
    texts = [e.text for e in ET.fromstring(design_picture.draw()).iter() if e.text]
    self.assertTrue(any(" → ".join(rooms) in text for text in texts), rooms)


if __name__ == "__main__":
  absltest.main()
