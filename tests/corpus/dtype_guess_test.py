"""Tests of guessing the dtype of a token file."""

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.corpus import dtype_guess


def _tokens(vocab_size: int, count: int = 4000) -> np.ndarray:
  """Returns ids distributed as in real text: small ones are frequent."""
  rng = np.random.default_rng(0)
  return np.minimum(rng.zipf(1.2, count) - 1, rng.integers(0, vocab_size, count)) + rng.integers(
      0, vocab_size // 4, count
  )


def _likelier(tokens: np.ndarray, actual: str, declared: str) -> str | None:
  sample = np.frombuffer(tokens.astype(actual).tobytes(), np.uint8)
  return dtype_guess.likelier_dtype_of_bytes(sample, np.dtype(declared).itemsize)


class LikelierDtypeTest(parameterized.TestCase):

  @parameterized.parameters(
      ("uint8", 250),
      ("uint16", 258),
      ("uint16", 50257),
      ("uint16", 65536),
      ("uint32", 258),
      ("uint32", 50257),
      ("uint32", 100278),
      ("uint32", 262144),
      ("uint64", 258),
      ("uint64", 100278),
  )
  def test_the_right_dtype_looks_right(self, dtype, vocab_size):
    self.assertIsNone(_likelier(_tokens(vocab_size) % vocab_size, dtype, dtype))

  @parameterized.parameters(
      ("uint16", "uint32", 258),
      ("uint16", "uint32", 50257),
      ("uint16", "uint64", 50257),
      ("uint16", "uint8", 258),
      ("uint32", "uint16", 258),
      ("uint32", "uint16", 50257),
      ("uint32", "uint16", 100278),
      ("uint32", "uint8", 100278),
      ("uint32", "uint64", 100278),
      ("uint64", "uint32", 100278),
      ("uint64", "uint16", 100278),
  )
  def test_a_wrong_dtype_is_recognised(self, actual, declared, vocab_size):
    self.assertEqual(_likelier(_tokens(vocab_size) % vocab_size, actual, declared), actual)

  def test_text_as_bytes_looks_like_uint8(self):
    text = np.frombuffer(
        b"It is a truth universally acknowledged, that a single man " * 20, np.uint8
    )
    self.assertIsNone(dtype_guess.likelier_dtype_of_bytes(text, 1))

  @parameterized.parameters(1, 2, 4, 8)
  def test_zeros_and_small_samples_prove_nothing(self, itemsize):
    self.assertIsNone(dtype_guess.likelier_dtype_of_bytes(np.zeros(4096, np.uint8), itemsize))
    self.assertIsNone(dtype_guess.likelier_dtype_of_bytes(np.full(64, 255, np.uint8), itemsize))
    self.assertIsNone(dtype_guess.likelier_dtype_of_bytes(np.zeros(0, np.uint8), itemsize))


if __name__ == "__main__":
  absltest.main()
