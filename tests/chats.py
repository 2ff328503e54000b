"""A small tokenizer with chat templates, and conversations, for tests of fine-tuning corpora."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable
from typing import Any

import tokenizers

EOS, PAD = "<|endoftext|>", "<|pad|>"
_TEXT = (
    "<|im_start|>assistant\nThe user asks, the assistant answers, and the system explains.\n"
    "What is two plus two? It is four. Thank you for the answer.\n\n  A tool returned 42.\n"
)

# Each turn is marked, and the last one ends with EOS, as in OLMo 3.
MARKED = """\
{%- for message in messages -%}
  {%- if message['role'] == 'assistant' -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- generation -%}
      {{- message['content'] -}}
      {%- if message['tool_calls'] %}{{ message['tool_calls'] | tojson }}{% endif -%}
      {{- eos_token if loop.last else '<|im_end|>' -}}
    {%- endgeneration -%}
    {{- '' if loop.last else '\\n' -}}
  {%- elif message['role'] in ('system', 'user', 'tool') -%}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
  {%- else -%}
    {{- raise_exception('unknown role ' + message['role']) -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""

# The same text without marks.
UNMARKED = MARKED.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")

# Every turn ends in the same way, with a token that is not EOS.
CHATML = """\
{%- for message in messages -%}
  {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""


def write_tokenizer(directory: pathlib.Path, template: str | None = MARKED) -> pathlib.Path:
  """Writes a byte-level tokenizer with some merges, and returns its directory."""
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  tokenizer.post_processor = tokenizers.processors.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
      vocab_size=300,
      special_tokens=[EOS, PAD, "<|im_start|>", "<|im_end|>"],
      initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
      show_progress=False,
  )
  tokenizer.train_from_iterator([_TEXT] * 3, trainer)
  directory.mkdir(parents=True, exist_ok=True)
  tokenizer.save(str(directory / "tokenizer.json"))
  config: dict[str, Any] = {"eos_token": EOS, "pad_token": {"content": PAD}, "bos_token": None}
  if template is not None:
    config["chat_template"] = template
  (directory / "tokenizer_config.json").write_text(json.dumps(config))
  return directory


def chat(*contents: str, system: str | None = None) -> list[dict[str, str]]:
  """Returns the messages of a conversation, in which user and assistant take turns."""
  roles = ("user", "assistant")
  messages = [{"role": "system", "content": system}] if system is not None else []
  return messages + [
      {"role": roles[number % 2], "content": text} for number, text in enumerate(contents)
  ]


def write_chats(path: pathlib.Path, rows: Iterable[Any]) -> pathlib.Path:
  """Writes rows as JSON lines; a row that is text is written as it is."""
  path.parent.mkdir(parents=True, exist_ok=True)
  lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
  path.write_text("".join(f"{line}\n" for line in lines))
  return path


def sums(count: int) -> list[dict[str, Any]]:
  """Returns rows with conversations of different lengths and numbers of turns."""
  rows = []
  for number in range(count):
    turns = [f"What is {number} plus {number + i}?" if i % 2 == 0 else "It is "
             + "four. " * (number % 5 + i) for i in range(2 * (number % 3 + 1))]  # fmt: skip
    system = "The system explains." if number % 2 else None
    rows.append({"id": f"sum-{number}", "messages": chat(*turns, system=system)})
  return rows
