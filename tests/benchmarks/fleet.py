"""Measures work over a whole corpus, side by side with the least that it could take.

Passes over token files (`verify`, `index documents`, `stats`) take turns with reading the same
files alone, from the page cache, and with counting the same number of tokens from the processor's
cache, which `stats` must do in addition to reading. `corpus make` takes turns with
`tokenizers` alone, which gets texts that are in memory already and throws its tokens away, and with
dolma's own tool, where it is installed. All use the same cores. Each runs in a process of its own,
in alternating order; the median of the ratios of all rounds counts, so that only ratios are
printed: of the time that passed and, for machines that do other work meanwhile, of the CPU time.
The clock starts after the imports, except for whole commands, as which `corpus make` and dolma's
tool are compared with each other.
"""

import argparse
import concurrent.futures
import contextlib
import glob
import gzip
import io
import itertools
import json
import os
import pathlib
import resource
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from maxtext_olmo import cores
from tests import distributed
from tests.benchmarks import figures

_VOCABULARY, _EOS = 100_278, 100_257
_DISTINCT = 1 << 24  # Random tokens; making more would take longer than all measurements.
_READ_BYTES = 256 << 10  # The fastest size for reading alone on the machines that were tried.
_BATCH_CHARACTERS = 1 << 20
_TEXT_FILES = 32
_TRAINED_ON = 4_000_000  # Characters.
# Passes over token files, as the words of a command. INDEX, OUTPUT and RESULTS stand for paths.
# The second one is what each machine of a fleet does; one of them then writes the document index.
_PASSES = {
    "verify": f"verify INDEX --vocab-size {_VOCABULARY} --eos-id {_EOS}",
    "index documents --part": (
        f"index documents INDEX --eos-id {_EOS} --part 0 --of 1 --results RESULTS"
    ),
    "index documents": f"index documents INDEX --eos-id {_EOS} --output OUTPUT",
    "stats": f"stats INDEX --eos-id {_EOS}",
}
_READING = "reading alone"
_COUNTING = "counting alone"
_TOKENIZERS = "tokenizers alone"
_OURS = "corpus make"
_COMMAND = "maxtext-olmo corpus make"
_DOLMA = "dolma tokens"
_BY_CPU = "by CPU time"


def write_tokens(folder: pathlib.Path, total: int) -> str:
  """Writes files that repeat random ids with an EOS every 1,000 tokens or so, and their index.

  As in text, the n-th most frequent id has about 1/n of the frequency of the first (Zipf's law).
  """
  import maxtext_olmo

  rng = np.random.default_rng(0)
  ids = (np.float32(_EOS) ** rng.random(_DISTINCT, np.float32) - 1).astype(np.uint32)
  ids[rng.random(len(ids)) < 1e-3] = _EOS
  ids[-1] = _EOS
  paths = []
  for number, share in enumerate((0.4, 0.3, 0.2, 0.1)):  # Unequal, as in a real corpus.
    paths.append(str(folder / f"part-{number}.npy"))
    with open(paths[-1], "wb") as file:
      for _ in range(max(1, round(share * total / ids.nbytes))):
        ids.tofile(file)
  index = maxtext_olmo.build_index(
      [(path, "web") for path in paths], 8192, tokenizer="none", dtype="uint32", base=str(folder)
  )
  index.save(str(folder / "index.json"))
  return str(folder / "index.json")


def write_texts(folder: pathlib.Path, total: int) -> list[str]:
  """Writes the sources of Python and of installed packages as JSON lines, compressed and not."""
  places = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
  found = (sorted(glob.glob(f"{place}/**/*.py", recursive=True)) for place in places)
  lines: list[str] = []
  size = 0
  for number, path in enumerate(dict.fromkeys(itertools.chain(*found))):
    with contextlib.suppress(UnicodeDecodeError, OSError):
      text = pathlib.Path(path).read_text(encoding="utf-8")
      lines.append(json.dumps({"id": f"doc-{number}", "text": text}) + "\n")
      size += len(text)
    if size >= total:
      break
  written = []
  for number in range(_TEXT_FILES):
    data = "".join(lines[number::_TEXT_FILES]).encode()
    written.append(str(folder / f"text-{number}.jsonl.gz"))
    pathlib.Path(written[-1]).write_bytes(gzip.compress(data, 1))
  return written


def train_tokenizer(folder: pathlib.Path, texts: list[str]) -> str:
  """Trains a tokenizer of the kind of OLMo's, and returns its path."""
  import tokenizers

  made = tokenizers.Tokenizer(tokenizers.models.BPE())
  made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  made.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
      vocab_size=20_000, special_tokens=["<|endoftext|>", "<|padding|>"], show_progress=False
  )
  sample = (text for path in texts for text in _texts(path))
  made.train_from_iterator(_first(sample, _TRAINED_ON), trainer)
  saved = json.loads(made.to_str())
  # dolma needs a release of `tokenizers` that reads merges only in this form.
  saved["model"]["merges"] = [" ".join(pair) for pair in saved["model"]["merges"]]
  (folder / "tokenizer.json").write_text(json.dumps(saved))
  return str(folder / "tokenizer.json")


def _texts(path: str) -> Iterator[str]:
  with gzip.open(path, "rt", encoding="utf-8") as file:
    for line in file:
      yield json.loads(line)["text"]


def _first(texts: Iterator[str], total: int) -> Iterator[str]:
  for text in texts:
    yield text
    total -= len(text)
    if total < 0:
      return


def read_alone(job: dict[str, Any]) -> Callable[[], None]:
  """Returns a function that reads all token files, with a thread per core."""
  paths = sorted(glob.glob(f"{os.path.dirname(job['index'])}/*.npy"))
  block = 16 * _READ_BYTES
  pieces = [(path, start) for path in paths for start in range(0, os.path.getsize(path), block)]

  def read(some: list[tuple[str, int]]) -> None:
    buffer = bytearray(_READ_BYTES)
    for path, start in some:
      descriptor = os.open(path, os.O_RDONLY)
      for offset in range(start, start + block, _READ_BYTES):
        os.preadv(descriptor, [buffer], offset)
      os.close(descriptor)

  def run() -> None:
    count = cores.available_cores()
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
      list(pool.map(read, [pieces[i::count] for i in range(count)]))

  return run


def count_alone(job: dict[str, Any]) -> Callable[[], None]:
  """Returns a function that counts ids as `stats` does, but reads nothing."""
  from maxtext_olmo.corpus import token_scan_kernel

  dtype = np.dtype("<u4")
  count_tokens = token_scan_kernel.build(dtype).count_tokens
  paths = glob.glob(f"{os.path.dirname(job['index'])}/*.npy")
  tokens = np.fromfile(paths[0], dtype, _READ_BYTES // dtype.itemsize)
  times = sum(map(os.path.getsize, paths)) // _READ_BYTES

  def count(repeats: int) -> None:
    counts = np.zeros(_VOCABULARY, np.uint32)
    for _ in range(repeats):
      count_tokens(tokens, counts)

  def run() -> None:
    number = cores.available_cores()
    with concurrent.futures.ThreadPoolExecutor(number) as pool:
      list(pool.map(count, [times // number] * number))

  return run


def _call(words: list[str]) -> None:
  """Runs a command of this package in this process; it must succeed."""
  from maxtext_olmo.cli import main as main_lib

  with contextlib.redirect_stdout(io.StringIO()) as printed:
    code = main_lib.main(words)
  if code:
    raise RuntimeError(f"{' '.join(words)} ended with {code}:\n{printed.getvalue()}")


def do_pass(job: dict[str, Any]) -> Callable[[], None]:
  """Returns a function that runs a command over the token files."""
  from maxtext_olmo.corpus import token_scan

  token_scan.compile_now(np.dtype("<u4"))
  output = os.path.join(job["folder"], "output")
  results = os.path.join(job["folder"], "results")
  places = {"INDEX": job["index"], "OUTPUT": output, "RESULTS": results}
  words = [places.get(word, word) for word in _PASSES[job["name"]].split()]

  def run() -> None:
    shutil.rmtree(results, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
      os.unlink(output)
    _call(words)

  return run


def tokenize_alone(job: dict[str, Any]) -> Callable[[], None]:
  """Returns a function that tokenizes texts in memory, with all cores, and drops the tokens."""
  import tokenizers

  tokenizer = tokenizers.Tokenizer.from_file(job["tokenizer"])
  batches: list[list[str]] = [[]]
  characters = 0
  for text in (text for path in job["texts"] for text in _texts(path)):
    batches[-1].append(text)
    characters += len(text)
    if characters >= _BATCH_CHARACTERS:
      batches.append([])
      characters = 0

  def run() -> None:
    for batch in batches:
      tokenizer.encode_batch_fast(batch, add_special_tokens=False)

  return run


def make_corpus(job: dict[str, Any]) -> Callable[[], None]:
  """Returns a function that runs `corpus make`, in this process or as a command."""
  from maxtext_olmo.corpus import make  # noqa: F401 - imports are not measured

  output = os.path.join(job["folder"], "made")
  words = ["corpus", "make", "--output", output, "--tokenizer", job["tokenizer"]]
  words += [f"web={path}" for path in job["texts"]]

  def run() -> None:
    shutil.rmtree(output, ignore_errors=True)
    if job["name"] == _OURS:
      _call(words)
      return
    subprocess.run(
        [sys.executable, "-m", "maxtext_olmo", *words],
        env=distributed.child_environment(),
        check=True,
        stdout=subprocess.DEVNULL,
    )

  return run


def run_dolma(job: dict[str, Any]) -> Callable[[], None]:
  """Returns a function that tokenizes the same files with dolma's own command."""
  output = os.path.join(job["folder"], "dolma")

  def run() -> None:
    shutil.rmtree(output, ignore_errors=True)
    command = [job["dolma"], "tokens", "--documents", *job["texts"], "--destination", output]
    command += ["--tokenizer.name_or_path", job["tokenizer"], "--tokenizer.eos_token_id", "0"]
    command += ["--tokenizer.pad_token_id", "1", "--dtype", "uint16"]
    command += ["--processes", str(cores.available_cores())]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

  return run


def measure(job: dict[str, Any]) -> dict[str, float]:
  """Runs a candidate in this process; returns the seconds that passed, and those of CPU time."""
  candidates = {
      _READING: read_alone,
      _COUNTING: count_alone,
      _TOKENIZERS: tokenize_alone,
      _OURS: make_corpus,
      _COMMAND: make_corpus,
      _DOLMA: run_dolma,
      **dict.fromkeys(_PASSES, do_pass),
  }
  run = candidates[job["name"]](job)
  if job["name"] in (_READING, _COUNTING, *_PASSES):
    run()  # Fills the page cache.
  began, used = time.perf_counter(), _cpu_seconds()
  run()
  return {"seconds": time.perf_counter() - began, "cpu": _cpu_seconds() - used}


def _cpu_seconds() -> float:
  """Returns the CPU time of this process and of its children that have ended."""
  both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
  return sum(usage.ru_utime + usage.ru_stime for usage in both)


class Ratios(NamedTuple):
  """The speed of a candidate, divided by that of the limit.

  Attributes:
    seconds: By the time that passed.
    cpu: By CPU time.
  """

  seconds: float
  cpu: float


def compare(names: list[str], limit: str, job: dict[str, Any], rounds: int) -> dict[str, Ratios]:
  """Returns the speed of each candidate, divided by that of the limit in the same round."""

  def run(name: str) -> figures.Run:
    return figures.fresh_process(__file__, "--job", json.dumps({**job, "name": name}))

  found = figures.alternate([limit, *names], rounds, run)
  return {
      name: Ratios(
          *(
              statistics.median(
                  alone[unit] / own[unit] for alone, own in zip(found[limit], found[name])
              )
              for unit in Ratios._fields
          )
      )
      for name in names
  }


def missing_dolma(command: str) -> str:
  """Returns why dolma cannot be measured; empty if it can."""
  if not os.path.exists(command):
    return f"there is no {command}; `make bench-fleet` installs it where that is possible"
  done = subprocess.run([command, "tokens", "--help"], capture_output=True, text=True, check=False)
  if done.returncode:
    return f"`{command} tokens --help` ends with: {done.stderr.strip().splitlines()[-1]}"
  return ""


def main() -> None:
  """Runs all comparisons and prints their ratios."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--dolma", default=".venv-dolma", help="environment with dolma's tool")
  parser.add_argument("--rounds", type=int, default=5)
  parser.add_argument("--megabytes", type=int, default=12000, help="size of the token files")
  parser.add_argument("--text-megabytes", type=int, default=60, help="size of the text")
  parser.add_argument("--only", choices=("passes", "tokenizing"), help="one half of the benchmark")
  parser.add_argument("--job", help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.job:
    print(json.dumps(measure(json.loads(args.job))))
    return
  print(f"{figures.machine()}; {args.rounds} rounds, medians of ratios")
  goals = []
  with tempfile.TemporaryDirectory(prefix="bench_fleet_") as name:
    folder = pathlib.Path(name)
    job: dict[str, Any] = {"folder": name}
    if args.only != "tokenizing":
      job["index"] = write_tokens(folder, args.megabytes << 20)
      found = compare([*_PASSES, _COUNTING], _READING, job, args.rounds)
      counting = found.pop(_COUNTING).seconds
      print(f"\n{args.megabytes} MB of tokens from the page cache\n")
      rows = [(one, f"{ratio.seconds:.2f}", f"{ratio.cpu:.2f}") for one, ratio in found.items()]
      print(figures.table(("pass", f"of {_READING}", _BY_CPU), rows), flush=True)
      goals += [figures.goal(one, ratio.seconds, "≥", 0.7, "×") for one, ratio in found.items()]
      least = 1 / (1 + 1 / counting)
      print(
          f"\nCounting alone runs at {counting:.2f} of the speed of reading alone, so reading and"
          f" then counting would run at {least:.2f}; stats reaches"
          f" {found['stats'].seconds / least:.2f} of that.\n"
      )
    if args.only != "passes":
      job["texts"] = write_texts(folder, args.text_megabytes << 20)
      job["tokenizer"] = train_tokenizer(folder, job["texts"])
      job["dolma"] = os.path.join(args.dolma, "bin", "dolma")
      peers = [_OURS]
      if reason := missing_dolma(job["dolma"]):
        print(f"dolma is left out: {reason}.")
      else:
        peers += [_COMMAND, _DOLMA]
      found = compare(peers, _TOKENIZERS, job, args.rounds)
      print(f"\n{args.text_megabytes} MB of text, from .jsonl.gz to token files\n")
      rows = [
          (
              one,
              f"{ratio.seconds:.2f}",
              f"{ratio.cpu:.2f}",
              f"{ratio.seconds / found[_DOLMA].seconds:.2f}" if one == _COMMAND else "–",
          )
          for one, ratio in found.items()
      ]
      head = ("command", f"of {_TOKENIZERS}", _BY_CPU, f"of {_DOLMA}")
      print(figures.table(head, rows), flush=True)
      goals.append(figures.goal(_OURS, found[_OURS].seconds, "≥", 0.8, "×"))
  print(figures.table(figures.GOALS_HEAD, goals))


if __name__ == "__main__":
  main()
