"""Tests of leases on a disk; tests/cloud/lease_test.py tests those in buckets."""

import os

from absl.testing import absltest

from maxtext_olmo.trainers import lease_places


class LeaseFileTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = os.path.join(self.create_tempdir().full_path, "checkpoints")
    self.place = lease_places.open_place(self.dir)
    self.place.prepare()

  def test_only_the_first_of_two_creates_it(self):
    self.assertIsNone(self.place.read())
    self.assertEqual([self.place.create("a"), self.place.create("b")], [True, False])
    self.assertEqual(self.place.read().text, "a")

  def test_a_takeover_replaces_only_the_lease_that_was_found(self):
    self.place.create("a")
    found = self.place.read()
    self.assertTrue(self.place.take_over(found, "b"))
    self.assertFalse(self.place.take_over(found, "c"))
    self.assertEqual(self.place.read().text, "b")
    self.assertEqual(os.listdir(self.dir), [lease_places.FILE_NAME])

  def test_only_the_holder_renews_and_removes_it(self):
    self.place.create("a")
    os.utime(self.place.path, (0, 0))
    self.place.renew("b")
    self.place.remove("b")
    self.assertEqual(self.place.read(), lease_places.Found("a", 0))
    self.place.renew("a")
    self.assertLess(abs(self.place.now() - self.place.read().renewed), 60)
    self.place.remove("a")
    self.assertIsNone(self.place.read())


if __name__ == "__main__":
  absltest.main()
