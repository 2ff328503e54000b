"""A decoder-only language model in plain JAX: parameters are a dict, the model is a function.

RMSNorm before each block, rotary positions, SwiGLU. Attention stays inside a document: token q sees
token k where k is not after q and both have the same segment id. For a row with the documents A and
B and one token of padding:

    segment   1 1 1 2 2 0         sees   A  A  A  B  B  .
    position  0 1 2 0 1 0          A0    x
                                   A1    x  x
                                   A2    x  x  x
                                   B0             x
                                   B1             x  x
                                   .                    x
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

Params = dict[str, Any]
Batch = dict[str, jax.Array]

_NORM_EPSILON = 1e-6
_INIT_STDDEV = 0.02


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The shape of a model."""

  vocab_size: int
  emb_dim: int
  num_layers: int
  num_heads: int
  head_dim: int
  mlp_dim: int
  logits_via_embedding: bool = True
  rope_max_timescale: int = 10_000
  dtype: str = "float32"
  remat: bool = False

  @classmethod
  def from_config(cls, config: ConfigDict) -> ModelConfig:
    """Takes the keys of these names."""
    return cls(**{field.name: config[field.name] for field in dataclasses.fields(cls)})


def init(rng: jax.Array, config: ModelConfig) -> Params:
  """Initial parameters, float32; those of all layers are stacked along a leading axis."""
  layers, emb = config.num_layers, config.emb_dim
  heads = config.num_heads * config.head_dim
  # What is added to the residual stream shrinks with the number of additions.
  out_stddev = _INIT_STDDEV / math.sqrt(2 * layers)
  shapes = {
      "query": ((layers, emb, heads), _INIT_STDDEV),
      "key": ((layers, emb, heads), _INIT_STDDEV),
      "value": ((layers, emb, heads), _INIT_STDDEV),
      "attention_out": ((layers, heads, emb), out_stddev),
      "gate": ((layers, emb, config.mlp_dim), _INIT_STDDEV),
      "up": ((layers, emb, config.mlp_dim), _INIT_STDDEV),
      "down": ((layers, config.mlp_dim, emb), out_stddev),
  }
  keys = jax.random.split(rng, len(shapes) + 2)
  params: Params = {
      "embedding": _normal(keys[0], (config.vocab_size, emb), _INIT_STDDEV),
      "layers": {
          name: _normal(key, shape, stddev)
          for key, (name, (shape, stddev)) in zip(keys[2:], shapes.items())
      },
      "final_norm": jnp.ones(emb),
  }
  for norm in ("attention_norm", "mlp_norm"):
    params["layers"][norm] = jnp.ones((layers, emb))
  if not config.logits_via_embedding:
    params["output"] = _normal(keys[1], (emb, config.vocab_size), _INIT_STDDEV)
  return params


def apply(params: Params, batch: Batch, config: ModelConfig) -> jax.Array:
  """The logits (rows, tokens, vocabulary) of a batch, float32."""
  dtype = jnp.dtype(config.dtype)
  x = params["embedding"].astype(dtype)[batch["inputs"]]
  mask = _attention_mask(batch["inputs_segmentation"])
  sin, cos = _rope_angles(batch["inputs_position"], config)
  layer: Any = functools.partial(_layer, mask=mask, sin=sin, cos=cos, config=config)
  if config.remat:
    layer = jax.checkpoint(layer)
  x, _ = jax.lax.scan(lambda x, weights: (layer(x, weights), None), x, params["layers"])
  x = _rms_norm(x, params["final_norm"])
  output = params["embedding"].T if config.logits_via_embedding else params["output"]
  return jnp.matmul(x, output.astype(dtype), preferred_element_type=jnp.float32)


def loss_sum(params: Params, batch: Batch, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
  """The sum of the cross-entropies of the tokens that count, and how many they are."""
  logits = apply(params, batch, config)
  target = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
  counts = batch["targets_segmentation"] != 0
  losses = jnp.where(counts, jax.nn.logsumexp(logits, axis=-1) - target, 0.0)
  return losses.sum(), counts.sum()


def parameter_count(params: Params) -> int:
  """How many numbers the parameters are."""
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def _normal(key: jax.Array, shape: tuple[int, ...], stddev: float) -> jax.Array:
  return stddev * jax.random.truncated_normal(key, -3.0, 3.0, shape)


def _layer(
    x: jax.Array,
    weights: Params,
    *,
    mask: jax.Array,
    sin: jax.Array,
    cos: jax.Array,
    config: ModelConfig,
) -> jax.Array:
  w = {name: value.astype(x.dtype) for name, value in weights.items()}
  h = _rms_norm(x, weights["attention_norm"])
  heads = (*x.shape[:2], config.num_heads, config.head_dim)
  query, key, value = ((h @ w[name]).reshape(heads) for name in ("query", "key", "value"))
  query, key = _rotate(query, sin, cos), _rotate(key, sin, cos)
  attended = jax.nn.dot_product_attention(query, key, value, mask=mask)
  x = x + attended.reshape(*x.shape[:2], -1) @ w["attention_out"]
  h = _rms_norm(x, weights["mlp_norm"])
  return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]


def _attention_mask(segments: jax.Array) -> jax.Array:
  """(rows, 1, queries, keys): who sees whom. Padding sees padding, so that no softmax is empty."""
  same = segments[:, None, :, None] == segments[:, None, None, :]
  length = segments.shape[1]
  return same & jnp.tril(jnp.ones((length, length), bool))


def _rope_angles(positions: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
  half = config.head_dim // 2
  timescale = float(config.rope_max_timescale) ** (jnp.arange(half) / half)
  angles = positions[:, :, None, None] / timescale
  return jnp.sin(angles), jnp.cos(angles)


def _rotate(x: jax.Array, sin: jax.Array, cos: jax.Array) -> jax.Array:
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
  return turned.astype(x.dtype)


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
  x32 = x.astype(jnp.float32)
  norm = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + _NORM_EPSILON)
  return (x32 * norm * scale).astype(x.dtype)
