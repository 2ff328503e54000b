"""A run with every kind of change: the batches it received, and what inspection says about them.

The tokens of the corpus are all different (but for EOS), so a row that was recorded tells which
file it came from, and where, without this library. A trainer is started for each of `phases`, all
arrays of each batch that its steps take are recorded (`save_batch`), and then the run's directory
is asked about every step and every document, in a process of its own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging
from absl.testing import absltest

from maxtext_olmo.corpus import documents as documents_lib
from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.loader import resume
from tests import distributed

LENGTH = 16
VOCABULARY = 4096
EOS = 0
PERIOD = 4  # Steps between checkpoints.
MIXTURE = {"wiki": 2.0, "web": 0.5, "code": 1.0}
_LATER_MIXTURE = {"wiki": 0.5, "web": 3.0}
_LABELS = ("wiki", "web", "wiki", "code", "web")  # Of each file.
_EXCLUDED_DOCUMENTS = (3, 40)
_EXCLUDED_LABEL = "code"
_EXCLUDED_ROWS = (20, 24)
_DTYPE = np.dtype("<u2")

Batch = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Document:
  """A document of the corpus: its file, its first token in it, and its number of tokens."""

  file: int
  first: int
  count: int


@dataclasses.dataclass(frozen=True)
class Corpus:
  """Token files, with an index and a document index.

  Attributes:
    index_path: The index.
    paths: The files.
    tokens: The tokens of each file.
    documents: All documents, in the order of the files.
  """

  index_path: str
  paths: Sequence[str]
  tokens: Sequence[np.ndarray]
  documents: Sequence[Document]

  def locate(self, row: np.ndarray) -> tuple[int, int]:
    """Returns the file and the token in it at which a row of tokens begins."""
    column = int(np.flatnonzero(row != EOS)[0])
    for file, tokens in enumerate(self.tokens):
      found = np.flatnonzero(tokens == row[column])
      if len(found):
        return file, int(found[0]) - column
    raise AssertionError(f"No file has token {row[column]}.")

  def excluded(self) -> set[tuple[int, int]]:
    """Returns the file and the place in it of each token that the list of exclusions names."""
    found = [self.documents[number] for number in _EXCLUDED_DOCUMENTS]
    ranges = [(document.file, document.first, document.count) for document in found]
    windows = []
    for file, tokens in enumerate(self.tokens):
      if _LABELS[file] == _EXCLUDED_LABEL:
        ranges.append((file, 0, len(tokens)))
      windows += [(file, first, LENGTH) for first in range(0, len(tokens) - LENGTH + 1, LENGTH)]
    ranges += windows[slice(*_EXCLUDED_ROWS)]
    return {(file, place) for file, first, n in ranges for place in range(first, first + n)}


def write_corpus(directory: pathlib.Path) -> Corpus:
  """Writes files of documents whose tokens are all different."""
  rng = np.random.default_rng(5)
  tokens, documents, paths = [], [], []
  number = 1
  for file in range(len(_LABELS)):
    pieces: list[np.ndarray] = []
    first = 0
    for length in rng.integers(3, 50, size=18).tolist():
      pieces.append(np.append(np.arange(number, number + length - 1), EOS))
      documents.append(Document(file, first, length))
      number, first = number + length - 1, first + length
    path = directory / "data" / f"part-{file}.npy"
    path.parent.mkdir(parents=True, exist_ok=True)
    tokens.append(np.concatenate(pieces))
    tokens[-1].astype(_DTYPE).tofile(path)
    paths.append(str(path))
  assert number < VOCABULARY
  index = index_lib.build_index(
      list(zip(paths, _LABELS)), LENGTH, tokenizer="test", dtype="uint16", base=str(directory)
  )
  path = directory / "index.json"
  index.save(str(path))
  documents_lib.build_documents(index, documents_lib.default_path(str(path)), EOS)
  return Corpus(str(path), paths, tokens, documents)


@dataclasses.dataclass(frozen=True)
class Phase:
  """One start of the trainer.

  Attributes:
    processes: How many processes it has.
    rows: Rows of a batch.
    keys: Data keys that differ from those of the run.
    steps: Steps in all, at which it ends; None if it is killed.
    kill_at: The step that has been trained when it is killed.
  """

  processes: int
  rows: int
  keys: dict[str, Any] = dataclasses.field(default_factory=dict)
  steps: int | None = None
  kill_at: int = 0


def phases(checkpoints: pathlib.Path, dice: random.Random) -> Iterator[Phase]:
  """Yields the phases of the run; each is made when the one before it has ended.

  Args:
    checkpoints: The directory of its checkpoints, which have their labels as names.
    dice: Decides when the run is killed.
  """
  yield Phase(1, 8, kill_at=dice.randrange(PERIOD + 2, PERIOD + 8))
  first = next_step(checkpoints)
  yield Phase(2, 4, kill_at=dice.randrange(first + 2 * PERIOD + 1, first + 3 * PERIOD))
  # Back to the first checkpoint of this phase, so that the steps after it come again.
  labels = resume.committed_steps(checkpoints)
  back = min(label for label in labels if label >= first)
  for label in labels:
    if label > back:
      shutil.rmtree(checkpoints / str(label))
  exclusions = checkpoints.parent / "exclude.jsonl"
  lines: list[dict[str, Any]] = [{"document": document} for document in _EXCLUDED_DOCUMENTS]
  lines += [{"label": _EXCLUDED_LABEL}, {"rows": list(_EXCLUDED_ROWS)}]
  exclusions.write_text("".join(json.dumps(line) + "\n" for line in lines))
  keys: dict[str, Any] = {"olmo_exclude": str(exclusions), "olmo_skip": ((back + 3, back + 5),)}
  end = back + 1 + 2 * PERIOD
  yield Phase(1, 4, keys, end)
  keys = {**keys, "olmo_skip": ((end + 2, end + 3),), "olmo_skip_mode": "mask"}
  keys = {**keys, "olmo_mixture": _LATER_MIXTURE, "olmo_allow_mixture_change": True}
  keys["olmo_stages"] = ({"from_step": end + PERIOD + 1, "olmo_mixture": MIXTURE},)
  yield Phase(1, 8, keys, end + 2 * PERIOD)


def next_step(checkpoints: pathlib.Path) -> int:
  """Returns the step with which a run resumes from its latest checkpoint."""
  label = resume.latest_committed_step(checkpoints)
  return 0 if label is None else label + 1


RunPhase = Callable[[Corpus, Phase, pathlib.Path], None]


def save_batch(directory: str | os.PathLike[str], step: int, process: int, batch: Any) -> None:
  """Writes the rows of a batch that this process holds; a kill leaves a whole file or none."""
  arrays: dict[str, np.ndarray] = {}
  for name, array in batch.items():
    shards = {
        shard.index[0].indices(array.shape[0])[0]: shard for shard in array.addressable_shards
    }
    for first, shard in sorted(shards.items()):
      rows = np.asarray(shard.data)
      assert rows.shape[1:] == array.shape[1:]
      arrays[f"{first}/{name}"] = rows
  path = pathlib.Path(directory, f"{step}-{process}")
  with open(path, "wb") as file:
    np.savez(file, **arrays)
  path.rename(path.with_suffix(".npz"))


def read_batches(directory: str | os.PathLike[str]) -> dict[int, dict[str, np.ndarray]]:
  """Returns the global batch of each step, from the files of all processes."""
  pieces: dict[int, dict[str, dict[int, np.ndarray]]] = {}
  for path in pathlib.Path(directory).glob("*.npz"):
    with np.load(path) as arrays:
      for key in arrays:
        first, name = key.split("/")
        by_name = pieces.setdefault(int(path.name.split("-")[0]), {})
        by_name.setdefault(name, {})[int(first)] = arrays[key]
  return {
      step: {
          name: np.concatenate([found[first] for first in sorted(found)])
          for name, found in by_name.items()
      }
      for step, by_name in sorted(pieces.items())
  }


@dataclasses.dataclass
class Record:
  """The batches that a run received.

  Attributes:
    corpus: Its corpus.
    fed: The batch of each step that is in the model: a restart takes back the steps after its
      checkpoint.
    attempts: Each phase with all that it was fed, from its first step on.
  """

  corpus: Corpus
  fed: dict[int, Batch] = dataclasses.field(default_factory=dict)
  attempts: list[tuple[Phase, dict[int, Batch]]] = dataclasses.field(default_factory=list)

  def add(self, phase: Phase, batches: dict[int, Batch], first: int) -> None:
    """Adds the batches of a phase, which begins with step `first`."""
    assert min(batches) == first, f"The phase began with step {min(batches)}, not {first}."
    self.fed = {step: batch for step, batch in self.fed.items() if step < first} | batches
    self.attempts.append((phase, batches))


class ProofTestCase(absltest.TestCase):
  """Compares the inspection of a run with the batches it received."""

  def prove(self, directory: pathlib.Path, checkpoints: pathlib.Path, run_phase: RunPhase) -> None:
    """Runs all phases, asks the run about every step and every document, and compares.

    Args:
      directory: Where everything else goes.
      checkpoints: The directory of the run's checkpoints.
      run_phase: Trains as a phase says, on a corpus, with `save_batch` in a directory.
    """
    seed = random.SystemRandom().randrange(1 << 30)
    logging.info("The seed of the kills is %d.", seed)
    record = Record(write_corpus(directory))
    for number, phase in enumerate(phases(checkpoints, random.Random(seed))):
      first, tap = next_step(checkpoints), directory / f"tap-{number}"
      tap.mkdir()
      run_phase(record.corpus, phase, tap)
      record.add(phase, read_batches(tap), first)
    self._check(record, str(checkpoints))

  def _check(self, record: Record, directory: str) -> None:
    corpus, fed = record.corpus, record.fed
    self.assertEqual(sorted(fed), list(range(len(fed))))
    self._check_changes(record)
    asked = ask(directory, len(fed), len(corpus.documents))
    # The command line and Python say the same, also one step at a time.
    self.assertEqual(asked["command"], asked["explanations"])
    step = len(fed) // 2
    self.assertEqual(_inspect(directory, "--step", str(step)), asked["command"][step])
    for step, batch in fed.items():
      explained = asked["arrays"][step]
      self.assertEqual(sorted(explained), sorted(batch))
      for name in batch:
        np.testing.assert_array_equal(explained[name], batch[name], f"{name} of step {step}")
      self._check_rows(corpus, batch, asked["command"][step])
    for number, document in enumerate(corpus.documents):
      visits = asked["documents"][number]
      with self.subTest(document=number):
        self.assertEqual(_visits(visits), _search(corpus, fed, document))
        self.assertEqual(bool(visits["reason"]), not visits["visits"])

  def _check_rows(self, corpus: Corpus, batch: Batch, explanation: dict[str, Any]) -> None:
    self.assertLen(explanation["rows"], len(batch["inputs"]))
    losses = np.count_nonzero(batch["targets_segmentation"], axis=1)
    for row, tokens in zip(explanation["rows"], batch["inputs"]):
      file, first = corpus.locate(tokens)
      read = [
          np.fromfile(
              part["file"],
              _DTYPE,
              count=(part["end_byte"] - part["first_byte"]) // _DTYPE.itemsize,
              offset=part["first_byte"],
          )
          for part in row["parts"]
      ]
      np.testing.assert_array_equal(np.concatenate(read), tokens)
      self.assertEqual(row["label"], _LABELS[file])
      self.assertEqual(row["loss_tokens"], losses[row["row"]])
      self.assertAlmostEqual(row["loss_share"], losses[row["row"]] / max(1, losses.sum()))
      spans = [
          (span["document"], span["column"], span["first"], span["last"], span["whole"])
          for part in row["parts"]
          for span in part["documents"]
      ]
      expected = []
      for number, document in enumerate(corpus.documents):
        low = max(first, document.first)
        high = min(first + LENGTH, document.first + document.count)
        if document.file == file and low < high:
          inside = low - document.first, high - document.first - 1
          whole = inside == (0, document.count - 1)
          expected.append((number, low - first, *inside, whole))
      self.assertEqual(spans, expected)

  def _check_changes(self, record: Record) -> None:
    """Checks that the trainer was fed what each phase asks for, without asking the library."""
    for phase, batches in record.attempts:
      masked: set[int] = set()
      if phase.keys.get("olmo_skip_mode") == "mask":
        masked = {step for skip in phase.keys["olmo_skip"] for step in range(*skip)}
      excluded = record.corpus.excluded() if "olmo_exclude" in phase.keys else set()
      for step, batch in batches.items():
        self.assertIn(len(batch["inputs"]), (phase.rows, phase.rows // phase.processes))
        for row, segments in zip(batch["inputs"], batch["targets_segmentation"]):
          file, first = record.corpus.locate(row)
          self.assertIn(_LABELS[file], _mixture_at(phase, step))
          targets = range(first + 1, first + LENGTH)
          loss = [step not in masked and (file, place) not in excluded for place in targets]
          self.assertEqual((segments != 0).tolist(), [*loss, False])
    (_, killed), (skipping, batches) = record.attempts[1:3]
    ((skip, end),) = skipping.keys["olmo_skip"]
    # The same steps come again, and then those after the skip; the last may lack rows of a process.
    for step in (*range(min(batches), skip), *range(end, max(killed) - 1)):
      again = step if step < skip else step - (end - skip)
      np.testing.assert_array_equal(batches[again]["inputs"], killed[step]["inputs"])
    consumed = [record.fed[step] for step in range(skip)]
    consumed += [killed[step] for step in range(skip, end)]
    consumed += [record.fed[step] for step in range(skip, len(record.fed))]
    self._check_epochs(record.corpus, [row for batch in consumed for row in batch["inputs"]])

  def _check_epochs(self, corpus: Corpus, rows: Sequence[np.ndarray]) -> None:
    """Checks that each label gives all its windows before it gives one again."""
    for label in set(_LABELS):
      files = [file for file, name in enumerate(_LABELS) if name == label]
      windows = sum(len(corpus.tokens[file]) // LENGTH for file in files)
      taken = [place for place in map(corpus.locate, rows) if place[0] in files]
      self.assertNotEmpty(taken)
      for first in range(0, len(taken), windows):
        epoch = taken[first : first + windows]
        self.assertLen(set(epoch), len(epoch), f"{label}, epoch {first // windows}")


def _mixture_at(phase: Phase, step: int) -> Mapping[str, float]:
  """Returns the mixture that a phase asks for at a step."""
  later = [s for s in phase.keys.get("olmo_stages", ()) if s["from_step"] <= step]
  return later[-1]["olmo_mixture"] if later else phase.keys.get("olmo_mixture", MIXTURE)


def _search(corpus: Corpus, fed: Mapping[int, Batch], document: Document) -> list[tuple[int, ...]]:
  """Returns the step, row, first and last column of each row that holds tokens of a document."""
  found = []
  for step, batch in sorted(fed.items()):
    for number, row in enumerate(batch["inputs"]):
      file, first = corpus.locate(row)
      low = max(first, document.first)
      high = min(first + LENGTH, document.first + document.count)
      if file == document.file and low < high:
        found.append((step, number, low - first, high - first - 1, high - low))
  return found


def _visits(visits: dict[str, Any]) -> list[tuple[int, ...]]:
  """Returns what the library says, as `_search` does; skipped samples have no step."""
  taken = [visit for visit in visits["visits"] if not visit["skipped"]]
  for visit in taken:
    assert visit["seen"], visit
  return sorted(
      (visit["step"], visit["row"], *visit["columns"], visit["tokens"]) for visit in taken
  )


def ask(directory: str, steps: int, documents: int) -> dict[str, Any]:
  """Asks a run about its steps and its documents, in a process that knows only its directory."""
  output = pathlib.Path(directory, "asked.pickle")
  words = [sys.executable, "-m", __name__, directory, str(output), str(steps), str(documents)]
  _run(words)
  return pickle.loads(output.read_bytes())


def _inspect(directory: str, *words: str) -> Any:
  command = [sys.executable, "-m", "maxtext_olmo", "inspect", directory, *words, "--json"]
  return json.loads(_run(command))


def _run(command: Sequence[str]) -> str:
  done = subprocess.run(
      command,
      env=distributed.child_environment(),
      capture_output=True,
      text=True,
      check=False,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  return done.stdout


def _main(directory: str, output: str, steps: int, documents: int) -> None:
  from maxtext_olmo.inspection import run as run_lib
  from tests.cli import runner

  answers: dict[str, Any] = {"arrays": [], "explanations": [], "documents": []}
  with run_lib.open_iterator(run_lib.find_run(directory)) as iterator:
    for step in range(steps):
      explanation = iterator.explain(step)
      answers["arrays"].append(explanation.arrays)
      answers["explanations"].append(explanation.to_json())
  code, printed, errors = runner.run("inspect", directory, "--steps", f"0:{steps}", "--json")
  assert code == 0, errors
  answers["command"] = json.loads(printed)
  for document in range(documents):
    words = ("--document", document, "--until", steps, "--json")
    code, printed, errors = runner.run("inspect", directory, *words)
    assert code in (0, 1), errors
    answers["documents"] += json.loads(printed)
  pathlib.Path(output).write_bytes(pickle.dumps(answers))


if __name__ == "__main__":
  _main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
