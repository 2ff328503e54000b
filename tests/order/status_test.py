"""Tests of maxtext_olmo.order.status."""

from absl.testing import absltest

import maxtext_olmo


class RunStatusTest(absltest.TestCase):

  def status(self, **changes) -> maxtext_olmo.RunStatus:
    facts = {"step": 1200, "position": 9600, "tokens": 2457600, "epoch": 3}
    identity = {"fingerprint": "9f", "order": "feistel", "seed": 7}
    return maxtext_olmo.RunStatus(**{**facts, "identity": identity, **changes})

  def test_the_text_says_every_fact(self):
    text = "1,200 steps done: 9,600 samples, 2,457,600 tokens\n"
    text += "next: step 1,200, position 9,600, epoch 3\n"
    text += "stream: fingerprint 9f, order feistel, seed 7"
    self.assertEqual(str(self.status()), text)
    self.assertEqual(repr(self.status()), text)

  def test_without_an_epoch_the_text_names_none(self):
    self.assertNotIn("epoch", str(self.status(epoch=None)))

  def test_skipped_samples_are_not_counted_as_done(self):
    text = str(self.status(skipped=1))
    self.assertIn("9,599 samples, 2,457,600 tokens (1 sample skipped)\n", text)
    self.assertIn("next: step 1,200, position 9,600", text)


if __name__ == "__main__":
  absltest.main()
