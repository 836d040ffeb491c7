"""Writes a copy of pqn_abs_atari.py with one of the changes that the README shows under "How to change it".

python benchmark/readme_change.py "Another divergence" my_abs.py
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def changes() -> dict[str, str]:
    """Title -> diff: hunks of lines that stay, go (-) and come (+), separated by lines of @@."""
    section = re.search(r"(?s)\n## How to change it\n(.*?)\n## ", (ROOT / "README.md").read_text())[1]
    return dict(re.findall(r"(?s)\*\*(.*?)\.\*\*.*?```diff\n(.*?)```", section))


def changed(title: str) -> str:
    """The script's text with a change. Errors: KeyError for an unknown title, ValueError where a hunk does not fit."""
    text = (ROOT / "pqn_abs_atari.py").read_text()
    for hunk in changes()[title].split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        old, new = ("".join(line[1:] for line in lines if line[0] in f" {sign}") for sign in "-+")
        if text.count(old) != 1:
            raise ValueError(f"{title}: these lines are {text.count(old)} times in the script:\n{old}")
        text = text.replace(old, new)
    return text


def main(argv: list[str]) -> None:
    titles = " or ".join(f'"{title}"' for title in changes())
    if len(argv) != 2 or argv[0] not in changes():
        raise SystemExit(f"readme_change.py: error: two arguments are needed, {titles}, and the file to write")
    if Path(argv[1]).exists():
        raise SystemExit(f"readme_change.py: error: {argv[1]} is there already")
    Path(argv[1]).parent.mkdir(parents=True, exist_ok=True)
    Path(argv[1]).write_text(changed(argv[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
