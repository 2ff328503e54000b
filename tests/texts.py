"""Text files of all formats, made from random words, for tests of making corpora."""

import gzip
import json
import pathlib
import random
from collections.abc import Iterator

WORDS = ("the", "of", "and", "数", "to", "été", "in", "is", "on\nthat", "by", "this\n", "", "with")


def random_texts(total: int, seed: int = 0) -> Iterator[str]:
  """Yields texts of very different lengths, with a number of characters in total."""
  rng = random.Random(seed)
  while total > 0:
    text = " ".join(rng.choices(WORDS, k=int(10 ** rng.uniform(0, 4))))[:total]
    total -= len(text)
    yield text


def json_lines(texts: Iterator[str]) -> str:
  """Returns texts as JSON lines; every second one has an id, and some lines are blank."""
  lines = []
  for number, text in enumerate(texts):
    ids = {"id": f"doc-{number}"} if number % 2 else {}
    lines.append(json.dumps({**ids, "text": text}, ensure_ascii=number % 3 == 0) + "\n")
    if not number % 10:
      lines.append("\n")
  return "".join(lines)


def write_texts(folder: pathlib.Path, total: int) -> dict[str, list[str]]:
  """Writes files of several formats, and returns their paths by label.

  Args:
    folder: Directory of the files.
    total: Number of characters in all files together, roughly.
  """
  folder.mkdir(parents=True, exist_ok=True)
  (folder / "large.jsonl").write_text(json_lines(random_texts(total // 2, 1)))
  (folder / "packed.jsonl.gz").write_bytes(
      gzip.compress(json_lines(random_texts(total // 4, 2)).encode())
  )
  (folder / "lines.txt").write_text("\n##\n".join(random_texts(total // 4, 3)))
  small = [folder / f"small-{number}.txt" for number in range(5)]
  for number, path in enumerate(small):
    path.write_text(next(random_texts(1000, 4 + number)))
  return {
      "web": [str(folder / "large.jsonl"), str(folder / "packed.jsonl.gz"), *map(str, small)],
      "books": [str(folder / "lines.txt"), str(small[0])],
  }


def read_tree(folder: pathlib.Path) -> dict[str, bytes]:
  """Returns the content of each file in a directory and below it, by relative path."""
  return {
      str(path.relative_to(folder)): path.read_bytes()
      for path in sorted(folder.rglob("*"))
      if path.is_file()
  }


def save_tokenizer(folder: pathlib.Path) -> str:
  """Saves a tokenizer of a few words, and returns the path of its `tokenizer.json`."""
  import tokenizers

  words = {word: number for number, word in enumerate(("<unk>", *(" ".join(WORDS).split())))}
  made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
  made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  made.add_special_tokens(["</s>"])
  folder.mkdir(parents=True, exist_ok=True)
  made.save(str(folder / "tokenizer.json"))
  return str(folder / "tokenizer.json")
