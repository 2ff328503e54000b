"""References for evaluation: the model reimplemented in NumPy, and a slow scorer.

`SlowLM` uses the harness's own reference path (`TemplateLM` and its rolling windows), and runs one
request at a time, without padding, in float64. It needs the extra `eval`.
"""

import functools
import json
import math
import pathlib
import random

import numpy as np
import optax

from maxtext_olmo.corpus import tokenizer as tokenizers
from maxtext_olmo.trainers.tiny import model

CONFIG = model.ModelConfig(
    vocab_size=260, emb_dim=32, num_layers=2, num_heads=2, head_dim=16, mlp_dim=64
)
_COLOURS = {
    "grass": "green",
    "sky": "blue",
    "blood": "red",
    "snow": "white",
    "coal": "black",
    "sun": "yellow",
}


def logits(params, tokens) -> np.ndarray:
  """Returns the logits (tokens, vocabulary) of one sequence, in float64, independently."""
  config = CONFIG
  p = {name: np.asarray(value, np.float64) for name, value in params.items() if name != "layers"}
  layers = {name: np.asarray(value, np.float64) for name, value in params["layers"].items()}
  n, half = len(tokens), config.head_dim // 2
  x = p["embedding"][np.asarray(tokens)]
  angles = np.arange(n)[:, None] / 10_000.0 ** (np.arange(half) / half)
  turn = np.exp(1j * angles)[:, None, :]
  hidden_from = np.triu(np.full((n, n), -np.inf), 1)

  def norm(x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale

  def rotate(x):
    turned = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([turned.real, turned.imag], -1)

  for i in range(config.num_layers):
    w = {name: value[i] for name, value in layers.items()}
    h = norm(x, w["attention_norm"])
    shape = (n, config.num_heads, config.head_dim)
    q, k, v = ((h @ w[name]).reshape(shape) for name in ("query", "key", "value"))
    q, k = rotate(q), rotate(k)
    scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(config.head_dim) + hidden_from
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    x = x + np.einsum("hqk,khd->qhd", weights, v).reshape(n, -1) @ w["attention_out"]
    h = norm(x, w["mlp_norm"])
    gate = h @ w["gate"]
    x = x + (gate / (1 + np.exp(-gate)) * (h @ w["up"])) @ w["down"]
  return norm(x, p["final_norm"]) @ p["embedding"].T


def score(params, tokens, scored) -> tuple[float, bool]:
  """Returns the log-probability of the last tokens, and whether each is the most likely one."""
  out = logits(params, tokens[:-1])[-scored:]
  targets = np.asarray(tokens[-scored:])
  top = out.max(-1, keepdims=True)
  normal = np.log(np.exp(out - top).sum(-1)) + top[:, 0]
  chosen = out[np.arange(scored), targets]
  return float((chosen - normal).sum()), bool((out.argmax(-1) == targets).all())


def make_slow_lm(params, max_length):
  """The slow scorer for the byte tokenizer."""
  from lm_eval import utils
  from lm_eval.api.model import TemplateLM

  class SlowLM(TemplateLM):
    """Scores one request at a time, as the harness does."""

    @property
    def eot_token_id(self):
      return tokenizers.ByteTokenizer.eos_id

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
      return list(string.encode())

    def _loglikelihood_tokens(self, requests, **kwargs):
      return [
          score(params, (context + continuation)[-(max_length + 1) :], len(continuation))
          for _, context, continuation in requests
      ]

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
      totals = []
      for request in requests:
        windows = utils.get_rolling_token_windows(
            self.tok_encode(request.args[0]), self.prefix_token_id, max_length, 1
        )
        pairs = [(None, *utils.make_disjoint_window(window)) for window in windows]
        totals.append(sum(logprob for logprob, _ in self._loglikelihood_tokens(pairs)))
      return totals

    def generate_until(self, requests, disable_tqdm=False):
      texts = []
      for request in requests:
        context, options = request.args
        tokens = self.tok_encode(context)[-(max_length - options["max_gen_toks"]) :]
        made = []
        for _ in range(options["max_gen_toks"]):
          made.append(int(logits(params, tokens + made)[-1].argmax()))
          text = bytes(token for token in made if token < 256).decode(errors="replace")
          if made[-1] == self.eot_token_id or any(stop in text for stop in options["until"]):
            break
        for stop in options["until"]:
          text = text.split(stop)[0]
        texts.append(text)
      return texts

  return SlowLM()


def text(seed: int, sentences: int = 4) -> str:
  """Returns sentences that a small model can learn."""
  chosen = random.Random(seed).choices(list(_COLOURS.items()), k=sentences)
  return " ".join(f"The colour of {thing} is {colour}." for thing, colour in chosen)


@functools.cache
def random_params():
  """Returns parameters of an untrained model with confident predictions."""
  import jax

  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), CONFIG))
  return jax.tree.map(
      lambda leaf: (rng.normal(size=leaf.shape) * 0.3 + (leaf.ndim < 2)).astype(np.float32), shapes
  )


@functools.cache
def trained_params():
  """Returns parameters after a little training on such sentences, as NumPy arrays."""
  import jax

  length, eos = 64, tokenizers.ByteTokenizer.eos_id
  documents = [[*text(seed).encode(), eos] for seed in range(256)]
  tokens = np.concatenate(documents)
  rows = tokens[: len(tokens) // length * length].reshape(-1, length).astype(np.int32)
  ones = np.ones((8, length - 1), np.int32)
  optimizer = optax.adam(1e-2)

  @jax.jit
  def step(params, state, rows):
    batch = {
        "inputs": rows[:, :-1],
        "targets": rows[:, 1:],
        "inputs_position": np.arange(length - 1)[None] * ones,
        "inputs_segmentation": ones,
        "targets_segmentation": ones,
    }

    def loss(params):
      total, count = model.loss_sum(params, batch, CONFIG)
      return total / count

    updates, state = optimizer.update(jax.grad(loss)(params), state)
    return optax.apply_updates(params, updates), state

  params = model.init(jax.random.key(0), CONFIG)
  state = optimizer.init(params)
  for i in range(40):
    params, state = step(params, state, rows[np.arange(8 * i, 8 * i + 8) % len(rows)])
  return jax.tree.map(np.asarray, params)


def apply(params, batch):
  """Applies the model to a batch of requests."""
  names = ("inputs", "inputs_position", "inputs_segmentation")
  return model.apply(params, {name: getattr(batch, name) for name in names}, CONFIG)


def write_tasks(directory) -> str:
  """Writes multiple-choice, rolling and generation tasks; returns their directory."""
  directory = pathlib.Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  pick = random.Random(1)
  questions = []
  for thing, colour in _COLOURS.items():
    choices = [*pick.sample([c for c in _COLOURS.values() if c != colour], 3), colour]
    pick.shuffle(choices)
    questions.append({"thing": thing, "choices": choices, "label": choices.index(colour)})
  _write_lines(directory / "colours.jsonl", questions)
  # At the limit of 64 tokens, below it, at twice it, and empty.
  texts = [text(seed, sentences) for seed, sentences in enumerate((1, 2, 3, 5, 8))]
  texts += [texts[-1][:64], texts[-1][:128], texts[-1][:65], "é" * 40, ""]
  _write_lines(directory / "texts.jsonl", [{"text": text} for text in texts])
  tasks = {
      "colours": {
          "output_type": "multiple_choice",
          "doc_to_text": "The colour of {{thing}} is",
          "doc_to_choice": "{{choices}}",
          "doc_to_target": "label",
          "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
      },
      "texts": {
          "output_type": "loglikelihood_rolling",
          "doc_to_text": "",
          "doc_to_target": "{{text}}",
          "metric_list": [{"metric": "bits_per_byte"}],
      },
      "say_colour": {
          "output_type": "generate_until",
          "doc_to_text": "The colour of {{thing}} is",
          "doc_to_target": " {{choices[label]}}",
          "generation_kwargs": {"until": ["."], "max_gen_toks": 10, "do_sample": False},
          "metric_list": [{"metric": "exact_match"}],
      },
  }
  for name, task in tasks.items():
    data = directory / ("texts.jsonl" if name == "texts" else "colours.jsonl")
    task |= {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "metadata": {"version": 1},
    }
    (directory / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML
  return str(directory)


def _write_lines(path: pathlib.Path, records) -> None:
  path.write_text("".join(json.dumps(record) + "\n" for record in records))
