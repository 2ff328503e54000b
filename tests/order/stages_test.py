import json

from absl.testing import absltest

from maxtext_olmo import errors
from maxtext_olmo import schema
from maxtext_olmo.order import stages

_SETTINGS = stages.Settings(
    order="feistel",
    seed=3,
    fingerprint="sha256:0",
    index_path="/a/index.json",
    mixture=(("web", 0.5), ("wiki", 2.0)),
    unit="weights",
)


class StageTest(absltest.TestCase):

  def test_a_stage_survives_json(self):
    for stage in (
        stages.Stage(4000, "step 1000", _SETTINGS),
        stages.Stage(4000, "step 1000", _SETTINGS, (("sha256:1", "ab"),)),
        stages.Stage(0, "", stages.Settings("olmo_core", 0, "sha256:1")),
        stages.Stage(0, "", stages.Settings("feistel", 0, "sha256:1", documents="xxh3:1")),
    ):
      values = json.loads(json.dumps(stage.to_json()))
      schema.check([values], [stages.SCHEMA])
      self.assertEqual(stages.Stage.from_json(values), stage)

  def test_the_json_of_windows_does_not_mention_documents(self):
    self.assertNotIn("documents", stages.Stage(0, "", _SETTINGS).to_json())

  def test_an_impossible_mixture_is_damage(self):
    values = stages.Stage(4000, "step 1000", _SETTINGS).to_json()
    for mixture in ({"web": "1"}, {"web": -1.0}, {"web": float("nan")}, {"web": True}):
      with self.assertRaisesRegex(errors.ResumeError, "the mixture of a stage is"):
        stages.Stage.from_json({**values, "mixture": mixture})

  def test_differences_have_the_names_of_the_keys(self):
    other = stages.Settings("feistel", 4, "sha256:0", mixture=(("web", 1.0),), unit="weights")
    self.assertEqual(
        _SETTINGS.differences(other),
        [
            "data_shuffle_seed: 3 then, 4 now",
            "olmo_mixture: {'web': 0.5, 'wiki': 2.0} then, {'web': 1.0} now",
        ],
    )

  def test_the_path_of_an_index_does_not_distinguish_stages(self):
    moved = stages.Settings(
        "feistel", 3, "sha256:0", "/b/index.json", _SETTINGS.mixture, _SETTINGS.unit
    )
    self.assertEqual(moved, _SETTINGS)
    self.assertEqual(_SETTINGS.differences(moved), [])


if __name__ == "__main__":
  absltest.main()
