"""Arguments of the command line that no command can use.

A command must end with its own exit code and a message. `_COMMANDS` has a call of each that works;
a case gives one of its options, or its first argument, a bad value.
"""

from __future__ import annotations

import contextlib
import functools
import json
import pathlib
from collections.abc import Iterator

from tests import chats
from tests.hostile import cases
from tests.hostile import damage
from tests.hostile import fixture

_NUMBERS = ("", "x", "-1", "0", "1e3", "9" * 30, "nan", "²", "1.5")
# `/dev` itself is never written to: the device is a node of the case's own folder.
_INPUTS = ("", "nowhere", "directory", "fifo", "loop", "dangling", "device-zero", "empty", "text",
           "file/below", "x" * 300, "deep")  # fmt: skip
_OUTPUTS = (
    "",
    "directory",
    "file/below",
    "loop",
    "fifo",
    "device-full",
    "x" * 300,
    "/proc/nothing",
)
_WORDS = ("", "x", "²", "a/b", "..", "x" * 5000)

_COMMANDS: dict[str, list[str]] = {
    "index build": ["--mix-file", "mix.txt", "--base", "data", "--tokenizer", "test", "--dtype",
                    "uint16", "--sequence-length", "8", "--output", "new.json"],
    "index show": ["index.json"],
    "index documents": ["index.json", "--eos-id", "0", "--output", "new.documents"],
    "verify": ["index.json", "--vocab-size", "100", "--eos-id", "0"],
    "plan": ["index.json", "--batch-size", "4"],
    "corpus make": ["text", "--output", "made"],
    "corpus make-sft": ["chats.jsonl", "--output", "made", "--tokenizer", "tokenizer", "--workers",
                        "1"],
    "order stats": ["--instances", "1000"],
    "order import-olmo-core": ["state.json", "--index", "index.json"],
    "olmo-core import": ["config.json", "--base", "data", "--output", "new.py"],
    "index mixture": ["mixture.json", "--requested-tokens", "100", "--global-batch-size", "32",
                      "--sequence-length", "8", "--dtype", "uint16", "--output", "new.json"],
    "maxtext migrate": ["--run-config", "run.yml", "--checkpoint-dir", "directory", "--devices",
                        "1"],
    "eval": ["--ppl", "index.json", "--config.checkpoint_dir=directory"],
    "demo": ["--directory", "demo", "--steps", "24"],
}  # fmt: skip
_OLMO_CORE_CONFIG = {
    "dataset": {
        "_CLASS_": "olmo_core.data.numpy_dataset.NumpyFSLDatasetConfig",
        "tokenizer": {"vocab_size": 1000, "eos_token_id": 0, "pad_token_id": 1},
        "paths": ["/data/*.npy"],
        "expand_glob": True,
        "sequence_length": 8,
    },
    "data_loader": {"global_batch_size": 32, "seed": 1},
}
_SOURCE = {"source_name": "a", "target_ratio": 1.0, "paths": ["data/*.npy"]}
_FIRST = "first argument"
_OPTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "index build": {
        "--mix-file": _INPUTS, "--base": _INPUTS, "--output": _OUTPUTS, "--extends": _INPUTS,
        "--sequence-length": _NUMBERS, "--max-target-sequence-length": _NUMBERS,
        "--source-permutation-seed": _NUMBERS, "--workers": _NUMBERS, "--dtype": _WORDS,
        "--checksums": _WORDS,
    },
    "index show": {_FIRST: _INPUTS},
    "index documents": {
        _FIRST: _INPUTS, "--eos-id": _NUMBERS, "--workers": _NUMBERS, "--output": _OUTPUTS
    },
    "verify": {
        _FIRST: _INPUTS, "--vocab-size": _NUMBERS, "--eos-id": _NUMBERS, "--workers": _NUMBERS,
        "--base": _INPUTS,
    },
    "plan": {
        _FIRST: _INPUTS, "--batch-size": _NUMBERS, "--steps": _NUMBERS, "--held-out": _NUMBERS,
        "--sequence-length": _NUMBERS, "--unit": _WORDS,
        "--mixture": ("", "x", "label-0", "label-0=", "label-0=x", "label-0=nan", "label-0=inf",
                      "label-0=-1", "label-0=0", "=1", "nowhere=1", "[=1"),
    },
    "corpus make": {
        _FIRST: _INPUTS, "--output": _OUTPUTS, "--tokens-per-file": _NUMBERS,
        "--tokenizer": _INPUTS,
    },
    "corpus make-sft": {
        _FIRST: _INPUTS, "--output": _OUTPUTS, "--tokenizer": _INPUTS, "--chat-template": _INPUTS,
        "--max-tokens": _NUMBERS, "--max-bad-rows": _NUMBERS, "--tokens-per-file": _NUMBERS,
        "--workers": _NUMBERS, "--messages-field": _WORDS,
    },
    "order stats": {"--instances": _NUMBERS, "--largest-stored": _NUMBERS, "--seed": _NUMBERS},
    "order import-olmo-core": {
        _FIRST: _INPUTS, "--index": _INPUTS, "--batch-size": _NUMBERS, "--write": _OUTPUTS,
        "--sequence-length": _NUMBERS,
    },
    "olmo-core import": {
        _FIRST: _INPUTS, "--state": _INPUTS, "--base": _INPUTS, "--index": _INPUTS,
        "--output": _OUTPUTS,
    },
    "index mixture": {
        _FIRST: _INPUTS, "--requested-tokens": _NUMBERS, "--global-batch-size": _NUMBERS,
        "--sequence-length": _NUMBERS, "--max-target-sequence-length": _NUMBERS,
        "--workers": _NUMBERS, "--output": _OUTPUTS,
    },
    "maxtext migrate": {"--run-config": _INPUTS, "--checkpoint-dir": _INPUTS, "--hosts": _NUMBERS},
    "eval": {"--ppl": _INPUTS, "--step": _NUMBERS, "--batch-size": _NUMBERS, "--config": _INPUTS},
    "demo": {"--steps": ("", "x", "-1", "0", "1e3", "nan", "²", "1.5")},
}  # fmt: skip
# What commands may do with a value, and why. Everything else must be refused.
_ANY_SEED = "any whole number is a seed"
_CAPPED = "more threads than files are not started"
_ACCEPTED: dict[tuple[str, str, str], str] = {
    ("index build", "--source-permutation-seed", "-1"): _ANY_SEED,
    ("index build", "--source-permutation-seed", "0"): _ANY_SEED,
    ("index documents", "--eos-id", "0"): "a token",
    ("index documents", "--output", ""): "next to the index",
    ("verify", "--eos-id", "0"): "a token",
    ("plan", "--steps", "9" * 30): "any number of steps",
    ("plan", "--sequence-length", "0"): "that of the index",
    ("order stats", "--largest-stored", "-1"): "no stored order is measured",
    ("corpus make", _FIRST, "deep"): "a text file",
    ("index build", "--source-permutation-seed", "9" * 30): _ANY_SEED,
    ("index build", "--workers", "9" * 30): _CAPPED,
    ("index documents", "--workers", "9" * 30): _CAPPED,
    ("verify", "--workers", "9" * 30): _CAPPED,
    ("verify", "--vocab-size", "9" * 30): "all ids are below it",
    ("plan", "--batch-size", "9" * 30): "a plan of less than one step",
    ("plan", "--held-out", "0"): "nothing is held out",
    ("order stats", "--seed", "0"): _ANY_SEED,
    ("order stats", "--largest-stored", "0"): "no stored order is measured",
    ("order stats", "--largest-stored", "9" * 30): "all stored orders are measured",
    ("corpus make", "--tokens-per-file", "9" * 30): "one file",
    ("corpus make-sft", "--output", "directory"): "an empty directory",
    ("corpus make-sft", "--max-bad-rows", "0"): "no row may be bad",
    ("corpus make-sft", "--max-bad-rows", "9" * 30): "any number of rows may be bad",
    ("corpus make-sft", "--max-tokens", "9" * 30): "no conversation is longer",
    ("corpus make-sft", "--tokens-per-file", "9" * 30): "one file",
    ("corpus make-sft", "--workers", "9" * 30): "more workers than chunks are not started",
    ("index build", "--output", "loop"): "the link is replaced by the index",
    ("index mixture", "--global-batch-size", "9" * 30): "one step, which the files do not fill",
    ("index mixture", "--workers", "9" * 30): _CAPPED,
    ("olmo-core import", "--index", ""): "next to the output",
    ("olmo-core import", "--index", "nowhere"): "the index is built there",
    ("olmo-core import", "--index", "dangling"): "the link is replaced by the index",
    ("index documents", "--output", "loop"): "the link is replaced by the document index",
    ("order import-olmo-core", "--write", "loop"): "the link is replaced by the config",
    ("corpus make", "--output", "directory"): "an empty directory",
    ("corpus make", _FIRST, "text"): "a text file",
    ("corpus make", _FIRST, "directory"): "a directory without files makes an empty corpus",
}


def all_cases() -> Iterator[cases.Case]:
  """Yields the cases of this module."""
  for command, options in _OPTIONS.items():
    for option, values in options.items():
      for value in values:
        yield cases.Case(
            f"arguments/{command} {option}={value[:12] if len(value) < 99 else 'long'}",
            functools.partial(_attempt, command=command, option=option, value=value),
            accept=_ACCEPTED.get((command, option, value), ""),
        )
  for argv in ((), ("x",), ("index",), ("verify",), ("--debug",), ("index", "build"), ("-x",)):
    attempt = functools.partial(lambda folder, argv: fixture.run_cli(*argv), argv=argv)
    yield cases.Case(f"arguments/{' '.join(argv) or 'none'}", attempt)


def _attempt(folder: pathlib.Path, command: str, option: str, value: str) -> None:
  fixture.write(folder)
  files = {
      "mix.txt": "".join(f"label-{i % 2},part-00{i}.npy\n" for i in range(4)), "empty": "",
      "text": "some words", "file": "x", "deep": damage.DEEP, "state.json": "{}",
      "run.yml": json.dumps({"olmo_index_path": str(folder / "index.json")}),
      "config.json": json.dumps(_OLMO_CORE_CONFIG),
      "mixture.json": json.dumps({"sources": [_SOURCE]}),
  }  # fmt: skip
  for name, text in files.items():
    (folder / name).write_text(text)
  if command == "corpus make-sft":
    chats.write_tokenizer(folder / "tokenizer")
    chats.write_chats(folder / "chats.jsonl", chats.sums(3))
  for name in ("directory", "fifo", "loop", "dangling", "device-zero", "device-full"):
    damage.put_in_place(folder / name, name)
  argv = list(_COMMANDS[command])
  if option == _FIRST:
    argv[0] = value
  else:
    if option in argv:
      del argv[(place := argv.index(option)) : place + 2]
    argv.append(f"{option}={value}")
  with contextlib.chdir(folder):
    fixture.run_cli(*command.split(), *argv)
  if value in ("fifo", "device-full") and (folder / value).is_file():
    raise cases.WrongDataError(f"{value} was replaced by a file")
