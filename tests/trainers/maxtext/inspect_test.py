"""Tests of `maxtext-olmo inspect` on the directories of runs of the real MaxText."""

import json
import pathlib
import shutil
import tempfile

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.corpus import tokenizer as tokenizer_lib
from maxtext_olmo.inspection import losses as losses_lib
from tests.cli import runner
from tests.inspection import small_run
from tests.trainers import proof
from tests.trainers.maxtext import runs

STARTS_PROCESSES = True

_LENGTH = 32
_TEXT = "harbour seal"


def _write_events_as_on_a_cluster():
  """Lets MaxText write event files, which it leaves out in a process without Google Cloud."""
  import tensorboardX.writer
  from maxtext.utils import max_utils

  max_utils.is_decoupled = lambda: False
  max_utils.writer = tensorboardX.writer
  max_utils._TENSORBOARDX_AVAILABLE = True


def setUpModule():
  runs.set_up_module()


@runs.needs_maxtext
class InspectTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    directory = pathlib.Path(tempfile.mkdtemp(prefix="maxtext_inspect_"))
    cls.addClassCleanup(shutil.rmtree, directory)
    cls.directory = directory
    small_run.write_texts(directory, small_run.texts())
    cls.fed = cls._train("run", 40, 8)
    # Another run continues from an earlier checkpoint of it, and passes over some of its steps.
    checkpoint = directory / "run" / "checkpoints" / "20" / "items"
    steering = (f"load_full_state_path={checkpoint}", "olmo_skip=((25, 30),)")
    cls.longer = {step: batch for step, batch in cls.fed.items() if step <= 20}
    cls.longer |= cls._train("longer", 50, 4, *steering)
    # As earlier releases left a run: with a data state in each of its checkpoints.
    shutil.copytree(directory / "longer", directory / "with_states")
    runs.add_states(directory, "with_states")

  @classmethod
  def _train(cls, name: str, steps: int, rows: int, *args: str) -> dict[int, dict[str, np.ndarray]]:
    tap = cls.directory / f"tap-{name}"
    tap.mkdir()
    runs.start(
        cls.directory,
        f"run_name={name}",
        f"steps={steps}",
        f"per_device_batch_size={rows}",
        f"max_target_length={_LENGTH}",
        "checkpoint_period=20",
        *args,
        arrays=tap,
    ).wait()
    return proof.read_batches(tap)

  def inspect(self, run: str, *words: object, code: int = 0) -> str:
    found, printed, errors = runs.in_child(runner.run, "inspect", self.directory / run, *words)
    self.assertEqual(found, code, errors + printed)
    return printed

  def test_the_state_is_found_from_the_run_its_checkpoints_and_one_of_them(self):
    for path, step in (("run", 40), ("run/checkpoints", 40), ("run/checkpoints/20", 21)):
      described = json.loads(self.inspect(path, "--json"))
      self.assertEqual((described["step"], described["position"]), (step, 8 * step))
      self.assertIn("is the one trained on", described["corpus"])
      self.assertIn(f"continues with step {step}", described["resume"])

  @parameterized.parameters("longer", "with_states")
  def test_a_step_before_and_after_a_change_of_the_batch_size_has_the_text_it_was_fed(self, run):
    tokenizer = tokenizer_lib.ByteTokenizer()
    for step in (20, 21, 24, 25, 49):
      rows = json.loads(self.inspect(run, "--step", step, "--text", "--json"))["rows"]
      shown = ["".join(piece["text"] for piece in row["text"]) for row in rows]
      fed = [tokenizer.decode(row[row < 256]) for row in self.longer[step]["inputs"]]
      self.assertEqual([text.replace("\\x1b", "\x1b") for text in shown], fed)

  @parameterized.parameters("longer", "with_states")
  def test_a_text_is_found_at_every_step_that_was_fed_it(self, run):
    found = json.loads(self.inspect(run, "--find", _TEXT, "--until", 50, "--json"))
    self.assertLen(found, 1)
    ids = np.frombuffer(_TEXT.encode(), np.uint8)
    expected = [
        (step, row)
        for step, batch in self.longer.items()
        for row, tokens in enumerate(batch["inputs"])
        if any((tokens[i : i + len(ids)] == ids).all() for i in range(_LENGTH - len(ids) + 1))
    ]
    self.assertNotEmpty(expected)
    visits = [(v["step"], v["row"]) for v in found[0]["visits"] if v["tokens"] == len(ids)]
    self.assertEqual(visits, expected)
    place = ("--file", found[0]["file"], "--byte", found[0]["first_byte"], "--until", 50)
    by_byte = json.loads(self.inspect(run, *place, "--json"))
    self.assertContainsSubset(visits, [(v["step"], v["row"]) for v in by_byte[0]["visits"]])

  def test_two_runs_are_compared(self):
    self.assertIn("same stream", self.inspect("longer", self.directory / "with_states"))
    printed = self.inspect("run", self.directory / "longer", code=1)
    self.assertIn("They differ from step 21 on; every step before it is the same.", printed)
    self.assertIn("rows of the batch: 8 in the first, 4 in the second", printed)

  def test_a_spike_in_the_event_files_leads_to_the_rows_that_caused_it(self):
    directory = self.directory / "spike"
    rng = np.random.Generator(np.random.PCG64(3))
    words = ["lorem", "ipsum", "dolor", "sit", "amet"]
    calm = " ".join(rng.choice(words, 8 * _LENGTH * 60)).encode()
    noise = rng.integers(1, 256, 8 * _LENGTH, dtype=np.uint8).tobytes()
    # In sequence, a batch is 8 rows: 44 calm steps, one of noise, 15 calm ones.
    entries = []
    for name, text, steps in (("a", calm, 44), ("noise", noise, 1), ("z", calm[::-1], 15)):
      path = directory / "data" / f"{name}.npy"
      path.parent.mkdir(parents=True, exist_ok=True)
      tokens = np.frombuffer(text, np.uint8)[: steps * 8 * _LENGTH].astype("<u2")
      tokens.tofile(path)
      entries.append((str(path), name))
    index_lib.build_index(entries, _LENGTH, tokenizer="bytes", dtype="uint16").save(
        directory / "index.json"
    )
    metrics = directory / "metrics.jsonl"
    runs.start(
        directory,
        "steps=60",
        "per_device_batch_size=8",
        f"max_target_length={_LENGTH}",
        "olmo_order=sequential",
        "checkpoint_period=20",
        f"metrics_file={metrics}",
        edit=_write_events_as_on_a_cluster,
    ).wait()
    logged = [json.loads(line) for line in metrics.read_text().splitlines()]
    expected = {int(r["step"]): r["learning/loss"] for r in logged if "learning/loss" in r}
    found = losses_lib.read_losses(str(directory / "run" / "tensorboard"))
    self.assertEqual(found.name, "learning/loss")
    self.assertEqual(found.steps.tolist(), list(range(60)))
    np.testing.assert_allclose(found.values, [expected[step] for step in range(60)], rtol=1e-6)
    self.assertEqual(found.positions, {step: 8 * step for step in range(60)})
    words = ("--losses", directory / "run" / "tensorboard", "--json")
    spikes = json.loads(self.inspect("spike/run", *words))
    self.assertEqual(spikes["logged_steps"], 60)
    together = spikes["together"]
    self.assertEqual([spike["peak"] for spike in together["spikes"]], [44])
    self.assertEqual(together["labels"][0]["label"], "noise")
    self.assertEqual({row["label"] for row in together["rows"][:8]}, {"noise"})
    # The positions in the log tell it from that of another run.
    self.inspect("longer", *words, code=2)

  def test_with_data_states_a_run_says_the_same_of_itself(self):
    described = [json.loads(self.inspect(run, "--json")) for run in ("longer", "with_states")]
    for one in described:
      del one["path"]
    self.assertEqual(*described)
    self.assertIn("skips steps 25:30 (positions 184 to 203)", str(described[0]["history"]))


if __name__ == "__main__":
  absltest.main()
