import numpy as np
from absl.testing import absltest

from maxtext_olmo.loader import announce
from tests.loader import cases

_STAGES = ({"from_step": 3, "data_shuffle_seed": 5}, {"from_step": 40, "data_shuffle_seed": 6})


class AnnounceTest(cases.LoaderCase):

  def test_the_place_of_a_position_is_that_in_its_stage(self):
    stream = self.train(olmo_stages=_STAGES).stream
    self.assertEqual(announce.place(stream, 11), "stage 0, epoch 0, place 11 of 12")
    self.assertEqual(announce.place(stream, 12), "stage 1, epoch 0, place 0 of 123")
    self.assertEqual(announce.place(stream, 12 + 123), "stage 1, epoch 1, place 0 of 25")
    self.assertEqual(announce.place(self.train().stream, 130), "epoch 1, place 7 of 123")

  def test_the_end_is_announced_too(self):
    train = self.train(olmo_num_epochs=1)
    train.go_to(31)
    with self.assertLogs(level="INFO") as logs:
      announce.announce("olmo_grain", train)
    self.assertIn(
        "step 31 at position 123 (the end of the data), first instances []", logs.output[0]
    )

  def test_skips_and_stages_in_force_or_ahead_are_announced(self):
    train = self.train(olmo_stages=_STAGES, olmo_skip=((5, 6), (20, 22)), olmo_skip_mode="mask")
    train.go_to(10)
    with self.assertLogs(level="INFO") as logs:
      announce.announce("olmo_grain", train)
    first, *others = [line.partition("olmo_grain: ")[2] for line in logs.output]
    self.assertIn("stage 1, epoch 0", first)
    self.assertIn("seed 5", first)
    self.assertEqual(
        others,
        [
            "positions 80 to 87 are without loss.",
            "stage 1 has been in force since position 12: feistel order, seed 5.",
            "stage 2 begins at position 160: feistel order, seed 6.",
        ],
    )

  def test_long_hashes_are_cut(self):
    train = self.train()
    with self.assertLogs(level="INFO") as logs:
      announce.announce("olmo_grain", train)
    self.assertRegex(logs.output[0], r"fingerprint sha256:[0-9a-f]{10}…, order")
    self.assertIn(str(np.asarray(train.row_numbers(0)).tolist()), logs.output[0])


if __name__ == "__main__":
  absltest.main()
