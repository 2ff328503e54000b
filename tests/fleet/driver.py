"""Does a work over a corpus in a process that tests can kill.

python -m tests.fleet.driver JOB.json

The job has the keys `index` (path of the index), `work` (a key of `_WORKS`, "sum", a list or "all"
of these, or "share"), `options` (of `WorkOptions`), `settings` (of the work), and `output` (where
to write what was found).
"""

import hashlib
import json
import pathlib
import sys
from typing import Any

from maxtext_olmo.corpus import document_spans
from maxtext_olmo.corpus import documents as documents_lib
from maxtext_olmo.corpus import index_builder
from maxtext_olmo.corpus import make
from maxtext_olmo.corpus import stats as stats_lib
from maxtext_olmo.corpus import token_files
from maxtext_olmo.corpus import tokenizer as tokenizer_lib
from maxtext_olmo.corpus import verify
from maxtext_olmo.corpus.work import run
from maxtext_olmo.corpus.work.options import WorkOptions
from maxtext_olmo.inspection import search
from maxtext_olmo.rows import packed_plan
from tests import texts
from tests.corpus.work import sample_work

_EOS, _SIZE = 0, sample_work.PIECE_BYTES


def _sha256(path: str) -> str:
  return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()


def _verify(index: Any, options: WorkOptions, output: str) -> Any:
  outcome = verify.check_pieces(index, options, vocab_size=40, eos_id=_EOS, piece_bytes=_SIZE)
  return repr(verify.make_report(index, outcome, vocab_size=40, eos_id=_EOS))


def _documents(index: Any, options: WorkOptions, output: str) -> Any:
  outcome = documents_lib.find_documents(index, _EOS, options, hashes=True, piece_bytes=_SIZE)
  documents_lib.write_documents(index, f"{output}.documents", _EOS, outcome, hashes=True)
  return _sha256(f"{output}.documents")


def _stats(index: Any, options: WorkOptions, output: str) -> Any:
  outcome = stats_lib.count_pieces(index, options, eos_id=_EOS, piece_bytes=_SIZE)
  return [
      [found.label, found.files, found.tokens, found.ids.tolist(), found.lengths.describe()]
      for found in stats_lib.make_stats(outcome)
  ]


def _pack(index: Any, options: WorkOptions, output: str) -> Any:
  boundaries = document_spans.BoundaryRule("eos", _EOS)
  rule = packed_plan.PackingRule(16, 2, "split", "stable", boundaries)
  outcome = packed_plan.pack_groups(index, rule, options)
  return _sha256(packed_plan.write_plan(index, f"{output}.plan", rule, outcome).path)


def _find(index: Any, options: WorkOptions, output: str) -> Any:
  files, tokenizer = token_files.TokenFiles.of_index(index), tokenizer_lib.ByteTokenizer()
  outcome = search.find_in_pieces("\x03\x07", tokenizer, index, files, options, piece_bytes=_SIZE)
  return [[hit.file, hit.first, hit.count] for hit in search.hits_of(outcome)]


def _make(index: Any, options: WorkOptions, output: str) -> Any:
  # The texts are in the same place for all engines: their paths are part of the corpus.
  folder = pathlib.Path(output).parent
  files = texts.write_texts(folder / "text", 100_000)
  tokenizer = tokenizer_lib.TokenizerSource.find(texts.save_tokenizer(folder / "words"))
  settings = make.MakeSettings(tokenizer, tokens_per_file=5000, unit_bytes=20_000)
  make.make_from_files(files, f"{output}.corpus", settings, options)
  made = texts.read_tree(pathlib.Path(f"{output}.corpus"))
  return {name: hashlib.sha256(data).hexdigest() for name, data in made.items()}


def _share(index: Any, options: WorkOptions, output: str) -> Any:
  pieces = sample_work.pieces(index)
  outcome = run.run_work(sample_work.TokenizeWork(), pieces, options, fingerprint="f")
  outcome.check("Some text was not tokenized")
  return [found["share"] for _, found in outcome]


_WORKS = {
    "verify": _verify,
    "documents": _documents,
    "stats": _stats,
    "pack": _pack,
    "find": _find,
    "make": _make,
}


def do_job(job: dict[str, Any]) -> dict[str, Any]:
  """Does the work, and returns what was found."""
  works = ["sum", *_WORKS] if job["work"] == "all" else job["work"]
  if isinstance(works, list):
    return {work: do_job({**job, "work": work}) for work in works}
  index = index_builder.load_index(job["index"])
  options = dict(job["options"])
  if options.get("part"):
    options["part"] = tuple(options["part"])
  options = WorkOptions(**options)
  if job["work"] == "share":
    return {"found": _share(index, options, job["output"])}
  if job["work"] in _WORKS:
    return {"found": _WORKS[job["work"]](index, options, job["output"])}
  settings = {
      name: tuple(value) if isinstance(value, list) else value
      for name, value in job.get("settings", {}).items()
  }
  work = sample_work.SumWork(**settings)
  outcome = run.run_work(work, sample_work.pieces(index), options, fingerprint=index.fingerprint)
  return {
      "values": sample_work.values(outcome),
      "failures": [[failure.item.key, failure.reason] for failure in outcome.failures],
      "reused": outcome.reused,
  }


def main() -> None:
  """Reads the job, does it, and writes what was found."""
  job = json.loads(pathlib.Path(sys.argv[1]).read_text())
  found = do_job(job)
  pathlib.Path(job["output"]).write_text(json.dumps(found))


if __name__ == "__main__":
  main()
