"""The scripts as text: copies that must not drift, the diff that is the paper, and a README that tells the truth."""

import ast
import dataclasses
import difflib
import importlib
import itertools
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import envpool
import pytest
from fake_envpool import CueGame, fake_make

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(path.stem for path in ROOT.glob("*.py"))
README = (ROOT / "README.md").read_text()


def source(script):
    return (ROOT / f"{script}.py").read_text()


def definitions(script):
    """Top-level functions and classes: name -> text, comments and decorators included."""
    text = source(script)
    lines = text.splitlines()
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return found


def part_two(script):
    head, mark, tail = source(script).partition("# Part two: plumbing.")
    assert head and mark
    return tail


def test_there_is_a_pair_to_compare():
    assert {"pqn_abs_atari", "pqn_fixed_atari"} <= set(SCRIPTS)


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(SCRIPTS, 2)))
def test_copies_do_not_drift(first, second):
    """Functions and classes of one name are one text; Args fields of one name have one default and help."""
    ours, theirs = definitions(first), definitions(second)
    shared = (ours.keys() & theirs.keys()) - {"Args", "main", "train"}
    assert len(shared) > 10
    for name in shared:
        diff = difflib.unified_diff(ours[name].splitlines(), theirs[name].splitlines(), first, second, lineterm="")
        assert ours[name] == theirs[name], "\n".join(diff)
    modules = importlib.import_module(first), importlib.import_module(second)
    fields = [{field.name: field for field in dataclasses.fields(module.Args)} for module in modules]
    helps = [field_helps(script) for script in (first, second)]
    for name in fields[0].keys() & fields[1].keys():
        assert fields[0][name].default == fields[1][name].default
        assert fields[0][name].type == fields[1][name].type
        assert helps[0][name] == helps[1][name]


def test_plumbing_is_the_same_text():
    assert part_two("pqn_fixed_atari") == part_two("pqn_abs_atari")
    before_main = [part_two(script).partition("# Main\n")[0] for script in SCRIPTS]
    assert len(set(before_main)) == 1 and "def check_args" in before_main[0]


def diff():
    result = subprocess.run(
        ["diff", "pqn_fixed_atari.py", "pqn_abs_atari.py"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    return result.stdout


def test_the_diff_is_the_paper():
    """At most 80 changed lines, all in the header, Args, the batch-rule section or `train`."""
    changed = [line for line in diff().splitlines() if line[0] in "<>"]
    assert 0 < len(changed) <= 80
    for name in set(definitions("pqn_fixed_atari")) - {"Args", "train"}:
        assert definitions("pqn_fixed_atari")[name] == definitions("pqn_abs_atari")[name]
    added = definitions("pqn_abs_atari").keys() - definitions("pqn_fixed_atari").keys()
    assert added == {"rollout_length_target", "adapt_rollout_length", "update_epochs_for"}
    assert definitions("pqn_fixed_atari").keys() <= definitions("pqn_abs_atari").keys()
    loops = [definitions(script)["train"].splitlines() for script in ("pqn_fixed_atari", "pqn_abs_atari")]
    in_loop = [line for line in difflib.ndiff(*loops) if line[0] in "+-"]
    assert len(in_loop) <= 10


def field_helps(script):
    """Args: field -> the string below it."""
    (args,) = [node for node in ast.parse(source(script)).body if getattr(node, "name", "") == "Args"]
    helps = {}
    for field, after in zip(args.body, args.body[1:]):
        if isinstance(field, ast.AnnAssign):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            helps[field.target.id] = after.value.value if is_text else ""
    return helps


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_field_of_args_is_used_explained_and_frozen(script):
    module = importlib.import_module(script)
    helps = field_helps(script)
    for field in dataclasses.fields(module.Args):
        assert helps.get(field.name), f"{field.name} has no help"
        uses = re.findall(rf"\b(?:args|self)\.{field.name}\b", source(script))
        assert uses, f"{field.name} is never used"
    with pytest.raises(dataclasses.FrozenInstanceError):
        module.Args().seed = 2


@pytest.mark.parametrize("script", SCRIPTS)
def test_sections_stand_in_their_order(script):
    banners = re.findall(r"^# =+\n# (.+)\n# =+$", source(script), flags=re.MULTILINE)
    probe = script == "divergence_probe"
    assert banners == [
        "Arguments", "Environment", "Network", "PQN", "Batch",
        *(["Divergence", "Gradient noise scale", "Twins", "Probe"] if probe else []),
        "Training",
        *(["Picture and summary"] if probe else []),
        "Several processes", "Evaluation and film", "Checkpoint and resume", "Logging and progress",
        "Checking the command line", "Main",
    ]  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS)
def test_public_definitions_have_docstrings(script):
    for node in ast.parse(source(script)).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name != "Args":
            assert ast.get_docstring(node), f"{node.name} has no docstring"


@pytest.mark.parametrize("script", SCRIPTS)
def test_importing_runs_nothing(script, tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", f"import {script}"], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_inline_requirements_are_those_of_requirements_txt(script):
    """PEP 723 block: every package that the script imports, at the version of requirements.txt."""
    block = re.search(r"(?m)^# /// script\n((?:#.*\n)+?)# ///$", source(script)).group(1)
    metadata = tomllib.loads("".join(line.removeprefix("#").removeprefix(" ") for line in block.splitlines(True)))
    pins = (ROOT / "requirements.txt").read_text().splitlines()
    assert all(re.fullmatch(r"[a-z-]+==[\d.]+", pin) for pin in pins)
    assert set(metadata["dependencies"]) <= set(pins)
    assert metadata["requires-python"]
    named = {pin.partition("==")[0] for pin in metadata["dependencies"]}
    roots = set()
    for node in ast.parse(source(script)).body:
        if isinstance(node, ast.Import):
            roots |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            roots.add(node.module.partition(".")[0])
    package = {"ale_py": "ale-py", "PIL": "pillow"}
    imported = {package.get(root, root) for root in roots - set(sys.stdlib_module_names)}
    assert imported <= named
    # Not imported by name: envpool's gymnasium API and torch's SummaryWriter need these.
    assert named - imported <= {"gymnasium", "tensorboard"}


# ----------------------------------------------------------------------------------------------------------------------
# README
# ----------------------------------------------------------------------------------------------------------------------


def table(heading):
    """Rows of the first table below a README heading, as lists of cells, without its head."""
    after = README.split(f"# {heading}\n", 1)[1].splitlines()
    lines = itertools.dropwhile(lambda line: not line.startswith("|"), after)
    rows = [line.strip("| ").split("|") for line in itertools.takewhile(lambda line: line.startswith("|"), lines)]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_the_readme_shows_the_diff():
    """To renew it, put the output of `diff pqn_fixed_atari.py pqn_abs_atari.py` between the fences."""
    shown = re.search(r"(?s)```diff\n(.*?)```", README).group(1)
    assert shown == diff()


def test_the_readme_shows_the_algorithm():
    shown = re.search(r"(?s)## The algorithm\n.*?```\n(.*?)```", README).group(1)
    box = re.search(r"(?s)rollouts of T steps:\n\n(.*?)\n\n", importlib.import_module("pqn_abs_atari").__doc__).group(1)
    assert shown.splitlines() == [line.removeprefix("    ") for line in box.splitlines()]


def test_the_glossary_is_what_is_logged(script, monkeypatch, tmp_path):
    monkeypatch.setattr(envpool, "make", fake_make(CueGame))
    result = script.main(
        ["--num-envs", "2", "--num-minibatches", "2", "--total-timesteps", "64", "--eval-episodes", "0",
         "--runs-dir", str(tmp_path), "--torch-threads", "1"]
    )  # fmt: skip
    with open(f"{result['run_dir']}/metrics.csv") as file:
        logged = file.readline().strip().split(",")[1:]
    assert [row[0].strip("`") for row in table("Metrics")] == [*logged, "eval/return"]


def test_the_probes_glossary_is_what_the_probe_measures():
    """Every column matches one tag of the table, <...> standing for a part between slashes, and every tag a column."""
    probe = importlib.import_module("divergence_probe")
    tags = [tag for row in table("The probe") for tag in re.findall(r"`([^`]+)`", row[0])]
    patterns = {tag: re.sub(r"<\w+>", "[^/]+", tag) for tag in tags}
    columns = probe.probe_metrics(probe.Args())
    for column in columns:
        assert [tag for tag, pattern in patterns.items() if re.fullmatch(pattern, column)], column
    for tag, pattern in patterns.items():
        assert any(re.fullmatch(pattern, column) for column in columns), tag
    text = README.split("# The probe\n", 1)[1].split("\n## ")[0]
    for word in (*probe.PAIRS, *{column.split("/")[-1] for column in columns if column.startswith("rollout")}):
        assert f"`{word}`" in text, word


def test_the_results_are_those_of_the_study():
    """The README's tables of the study are those of analyse.py's summaries, line by line, and none is left out."""
    folder = ROOT / "benchmark" / "results" / "laptop"
    summaries = {path.name: path.read_text() for path in folder.glob("*summary.md")}
    shown = []
    for head in ("| game | arm | seeds |", "| arm | interquartile mean,"):
        whole = rf"(?m)^{re.escape(head)}.*\n(?:\|.*\n)+"
        for table in re.findall(whole, README):
            shown.append([name for name, text in summaries.items() if table in re.findall(whole, text)])
    assert all(shown)
    assert set().union(*shown) == set(summaries) == {"summary.md", "near_free_summary.md", "large_summary.md"}


def test_deviations_in_the_code_and_in_the_readme_agree():
    """The function that holds a DEVIATION comment is named in the README's table, and the other way round."""
    marked = set()
    for script in SCRIPTS:
        marked |= {name for name, text in definitions(script).items() if "# DEVIATION:" in text}
    assert {row[0].strip("`") for row in table("Deviations")} == marked
    assert len(marked) >= 5


def test_flags_and_files_that_the_readme_names_exist():
    fields = set()
    for script in SCRIPTS:
        fields |= {field.name for field in dataclasses.fields(importlib.import_module(script).Args)}
    switches = {"no_" + name for name in fields}
    own = {"title", "out", "runs", "logdir", "help", "jobs", "rounds", "seconds", "against"}  # of others
    own |= {"levers", "settings", "no_bf16", "repeats", "arms", "also", "prefix", "improved"}
    own |= {"nproc_per_node", "nnodes", "rdzv_backend", "rdzv_endpoint"}  # torchrun's
    own |= {"array", "gpus", "cpus_per_task", "wrap"}  # Slurm's
    for flag in re.findall(r"(?<![\w-])--([a-z][a-z0-9-]+)", README):
        assert flag.replace("-", "_") in fields | switches | own, flag
    for path in re.findall(r"`((?:benchmark|tests)/[\w/.-]+|[\w-]+\.py|requirements\.txt)`", README):
        assert (ROOT / path).exists(), path
    for target in re.findall(r"\]\((?!https?:|#)([^)]+)\)", README):
        assert (ROOT / target).exists(), target


def test_ci_runs_the_readmes_test_command():
    command = re.search(r"&& (\S*python -m pytest)\n", README).group(1)
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert command in lines
    setup = re.search(r"(?m)^(python3 -m venv .*) && \S*python -m pytest$", README).group(1)
    for step in setup.split(" && "):
        assert step in [line.replace("install --quiet", "install") for line in lines]


def test_no_path_of_a_machine_in_the_tree():
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    words = re.compile("/(home|root|work|tmp|usr/local|opt)" + "/")  # split, so that it does not find itself
    for name in files:
        if not name.endswith((".png", ".gif", ".pt")):
            assert not words.search((ROOT / name).read_text()), name
