"""Tests for generation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.evaluation import generate as generate_lib
from maxtext_olmo.evaluation import scoring
from maxtext_olmo.evaluation import tokenizer as tokenizer_lib
from tests.evaluation import pipeline_cases
from tests.evaluation import reference

Generation = generate_lib.Generation


def read(max_length=None, **arguments):
  return Generation.read(arguments, default_tokens=256, max_length=max_length)


@functools.cache
def make_generator(batch_size, seed):
  scorer = scoring.Scorer(
      reference.apply,
      pipeline_cases.make_mesh(),
      batch_size=batch_size,
      padding_multiple=32,
      max_length=64,
  )
  tokenizer = tokenizer_lib.load_eval_tokenizer("bytes")
  return generate_lib.Generator(reference.apply, scorer, tokenizer, seed=seed)


class GenerationTest(parameterized.TestCase):

  @parameterized.parameters(
      ({}, ((), 256, 0.0)),
      ({"until": "."}, ((".",), 256, 0.0)),
      ({"until": ["a", "", "b"], "max_new_tokens": 7}, (("a", "b"), 7, 0.0)),
      ({"max_gen_toks": 3, "max_tokens": 9}, ((), 3, 0.0)),
      ({"do_sample": True}, ((), 256, 1.0)),
      ({"do_sample": True, "temperature": 0.5}, ((), 256, 0.5)),
      ({"do_sample": False, "temperature": 0.5, "top_p": 0.9}, ((), 256, 0.0)),
      ({"temperature": 0.7}, ((), 256, 0.7)),
      ({"temperature": 0.0, "do_sample": True}, ((), 256, 0.0)),
      ({"temperature": 1.0, "top_p": 1.0, "top_k": 0, "num_beams": 1}, ((), 256, 1.0)),
  )
  def test_arguments_mean_what_they_mean_to_the_harness(self, arguments, expected):
    self.assertEqual(read(**arguments), Generation(*expected))

  def test_the_default_leaves_room_for_a_context(self):
    self.assertEqual(read(max_length=100).max_tokens, 50)

  @parameterized.parameters(
      ({"temperature": 1.0, "top_p": 0.9}, r"does not support \{'top_p': 0.9\}"),
      ({"num_beams": 4}, "does not support"),
      ({"max_gen_toks": 0}, "max_gen_toks=0"),
      ({"temperature": -1.0}, "temperature=-1.0"),
      ({"max_gen_toks": 64}, "leaves no room for a context: the model takes at most 64"),
  )
  def test_unsupported_arguments_are_an_error(self, arguments, message):
    with self.assertRaisesRegex(errors.ConfigError, message):
      read(max_length=64, **arguments)


class GeneratorTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.params = reference.random_params()

  def generate(self, contexts, generation, *, batch_size=4, seed=0):
    generator = make_generator(batch_size, seed)
    return dict(generator.generate(self.params, dict(enumerate(contexts)), generation))

  def greedy(self, context, tokens, max_length=64):
    """Token by token, without padding, in float64."""
    made = []
    ids = list(context.encode())[-(max_length - tokens) :] or [256]
    for _ in range(tokens):
      made.append(int(reference.logits(self.params, ids + made)[-1].argmax()))
      if made[-1] == 256:
        break
    return bytes(token for token in made if token < 256).decode(errors="replace")

  def test_greedy_text_is_that_of_the_slow_model(self):
    contexts = ["The colour of", "", reference.text(3, 6), "sky", "The", "x"]
    found = self.generate(contexts, Generation((), 12, 0.0))
    self.assertEqual(
        [found[i] for i in range(len(contexts))], [self.greedy(c, 12) for c in contexts]
    )

  def test_text_ends_before_the_first_stop(self):
    whole = self.greedy("The colour of", 20)
    stop = whole[5:7]
    found = self.generate(["The colour of"], Generation((stop, "no such text"), 20, 0.0))
    self.assertEqual(found[0], whole[: whole.index(stop)])

  def test_eos_ends_a_text(self):
    # A model that says "a" twice and then EOS.
    def apply(params, batch):
      del params
      length = batch.inputs_segmentation.sum(axis=1)
      token = jnp.where(length < 3, 97, 256)
      one_hot = jax.nn.one_hot(token, 258)
      return jnp.broadcast_to(one_hot[:, None], (*batch.inputs.shape, 258))

    scorer = scoring.Scorer(apply, pipeline_cases.make_mesh(), batch_size=2, padding_multiple=16)
    tokenizer = tokenizer_lib.load_eval_tokenizer("bytes")
    generator = generate_lib.Generator(apply, scorer, tokenizer, seed=0)
    found = dict(generator.generate((), {5: "x", 9: "xxxx"}, Generation((), 10, 0.0)))
    self.assertEqual(found, {5: "aa", 9: ""})

  def test_samples_depend_on_seed_and_request_but_not_on_the_batch(self):
    contexts = ["The colour of sky is", "The", "The", "sun"]
    generation = Generation((), 5, 1.0)
    found = self.generate(contexts, generation)
    self.assertEqual(self.generate(contexts, generation, batch_size=1), found)
    self.assertNotEqual(found[1], found[2])
    self.assertNotEqual(self.generate(contexts, generation, seed=1), found)

  def test_samples_follow_the_distribution(self):
    count = 200
    found = self.generate(["The colour of sky is "] * count, Generation((), 1, 1.0))
    out = reference.logits(self.params, list(b"The colour of sky is "))[-1]
    expected = np.exp(out - out.max()) / np.exp(out - out.max()).sum()
    top = int(expected.argmax())
    share = np.mean([text == chr(top) for text in found.values()])
    spread = np.sqrt(expected[top] * (1 - expected[top]) / count)
    self.assertAlmostEqual(share, expected[top], delta=5 * spread + 1e-9)


if __name__ == "__main__":
  absltest.main()
