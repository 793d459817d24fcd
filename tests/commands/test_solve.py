"""`sigma0 solve` from the command line, over the shipped models, our own server and the files that it leaves."""

import io
import json
import shutil
import sys
from functools import partial

import pytest
from rich.console import Console

from sigma0.checkpoints import resolve_model
from sigma0.commands.solve_models import as_ladder, open_chats, source
from sigma0.commands.solve_progress import SolveProgress
from sigma0.reason.messages import Completion
from sigma0.reason.progressive.policies import PRESETS, ProgressiveConfig
from sigma0.reason.trail import Call, Decision, Heading, Outcome, Trail, read_lines
from tests.serve.conftest import served
from tests.test_cli import run as command

STORY = "Mary went to the park. The hat is with Mary. Where is the hat?"
POCKET = ["--model", "pocket"]
run = partial(command, "solve")
SMALL = [*POCKET, "--max-tokens", "8", "--config", "FAST_TEST"]


def test_a_progressive_run_leaves_memory_and_trail(tmp_path):
    memory, trail = tmp_path / "memory.json", tmp_path / "trail.jsonl"
    result = run(STORY, *SMALL, "--memory", str(memory), "--trail", str(trail))
    lines = read_lines(trail)
    assert isinstance(lines[0], Heading) and (lines[0].strategy, lines[0].models) == ("progressive", ("pocket",))
    assert ProgressiveConfig.from_dict(lines[0].settings["policy"]) == PRESETS["FAST_TEST"]
    assert isinstance(lines[-1], Outcome) and result.exit_code == (0 if lines[-1].solved else 1)
    assert lines[-1].why in " ".join(result.stdout.split())
    assert json.loads(memory.read_text())["solution"] == lines[-1].answer
    again = run(STORY, *SMALL, "--memory", str(memory))
    assert again.exit_code == 2 and "add --resume" in again.stderr
    # a finished run that is resumed asks nothing more
    resumed = run(STORY, *POCKET, "--memory", str(memory), "--resume", "--trail", str(trail), "--json")
    assert resumed.exit_code == result.exit_code
    assert json.loads(resumed.stdout)["solution"] == lines[-1].answer
    more = read_lines(trail)[len(lines) :]
    assert [type(line) for line in more] == [Heading, Outcome] and more[0].resumed
    shown = command("trail", str(trail))
    assert shown.exit_code == 0 and "verify 0" in shown.stdout
    reported = json.loads(command("trail", str(trail), "--json").stdout)
    assert reported["outcome"]["answer"] == lines[-1].answer and reported["lines"]["heading"] == 2


def test_limits_stop_a_run_which_goes_on_later(tmp_path):
    memory = tmp_path / "memory.json"
    short = run(STORY, *SMALL, "--memory", str(memory), "--max-calls", "4", "--json")
    assert short.exit_code == 1 and "limit of 4 calls" in json.loads(short.stdout)["why"]
    # the problem from standard input, the policy from the environment
    options, environment = [*POCKET, "--max-tokens", "8"], {"SIGMA0_PROGRESSIVE_CONFIG": "FAST_TEST"}
    whole = json.loads(run("-", *options, "--json", input=f"{STORY}\n", env=environment).stdout)
    resumed = json.loads(run(STORY, *SMALL, "--memory", str(memory), "--resume", "--json").stdout)
    for reported in (whole, resumed):
        del reported["usage"]["seconds"]
    assert (resumed["solution"], resumed["status"]) == (whole["solution"], whole["status"])
    other = run(STORY, "--config", "A", "--memory", str(memory), "--resume")
    assert other.exit_code == 2 and "not the policy of the memory file" in " ".join(other.stderr.split())
    # what a run took ends it
    lines = run(STORY, *SMALL).stdout.splitlines()
    levels = dict(part.split() for part in lines[-2].partition(": ")[2].split(", "))
    assert list(levels) == ["low", "medium", "high"] and sum(map(int, levels.values())) == whole["status"]["iteration"]
    usage = whole["usage"]
    assert lines[-1].startswith(f"questions {usage['calls']}: {usage['completion_tokens']} tokens, ")


def test_an_endpoint_and_a_ladder_answer(pocket, tmp_path):
    with served(pocket) as server:
        trail = tmp_path / "trail.jsonl"
        url = f"{server.url}/v1"
        result = run(STORY, *SMALL, "--base-url", url, "--max-calls", "5", "--trail", str(trail))
        assert result.exit_code in (0, 1), result.stderr
        calls = [line for line in read_lines(trail) if isinstance(line, Call)]
        assert len(calls) == 5 and all(call.answer["verdict"] is not None for call in calls)
        mixed = run(STORY, *SMALL, "--ladder", f"pocket,pocket@{url}", "--max-calls", "3", "--json")
        # two rungs of one name
        assert mixed.exit_code == 2 and "name of its own" in mixed.stderr
        gone = run(STORY, "--base-url", "http://127.0.0.1:9/v1", "--memory", str(tmp_path / "m.json"))
        assert gone.exit_code == 2 and "no connection" in gone.stderr and "--resume goes on" in gone.stderr
    tokens = run(STORY, *SMALL, "--ladder", "pocket,pocket-large", "--max-calls", "3", "--json")
    assert json.loads(tokens.stdout)["usage"]["bytes_read"] > 0


def test_a_lemma_run_draws_its_graph(tmp_path):
    graph, trail, config = tmp_path / "plan.mmd", tmp_path / "trail.jsonl", tmp_path / "settings.json"
    config.write_text('{"repairs": 0, "restructures": 0}')
    options = [*POCKET, "--config", str(config), "--max-tokens", "16", "--graph", str(graph), "--trail", str(trail)]
    result = run(STORY, "--strategy", "lemma", *options)
    # these models know no plans and no Python: they give up, and say so
    assert result.exit_code == 1 and "x FINAL: failed" in result.stdout, result.output
    assert "best guess, which nothing vouches for" in result.stdout and "NOT solved" in result.stdout
    assert graph.read_text().startswith("graph TD") and "FINAL" in graph.read_text()
    lines = read_lines(trail)
    assert lines[0].settings["max_tokens"] == 16 and lines[0].settings["repairs"] == 0
    assert isinstance(lines[-1], Outcome) and not lines[-1].solved
    config.write_text('{"repair": 0}')
    bad = run(STORY, "--strategy", "lemma", "--config", str(config))
    assert bad.exit_code == 2 and "repair" in bad.stderr


def test_a_lemma_run_that_was_cut_off_ends_as_a_whole_one(tmp_path):
    whole = run(STORY, *POCKET, "--strategy", "lemma", "--max-tokens", "16", "--json")
    options = [*POCKET, "--strategy", "lemma", "--max-tokens", "16", "--memory", str(tmp_path / "m.jsonl"), "--json"]
    cut = run(STORY, *options, "--max-calls", "3")
    assert cut.exit_code == 1 and json.loads(cut.stdout)["usage"]["calls"] == 3
    with (tmp_path / "m.jsonl").open("a") as file:
        # as a killed run leaves it
        file.write('{"purpose": "half')
    trail = tmp_path / "trail.jsonl"
    resumed = run(STORY, *options, "--resume", "--trail", str(trail))
    reported, expected = json.loads(resumed.stdout), json.loads(whole.stdout)
    assert resumed.exit_code == whole.exit_code == 1
    assert reported["usage"].pop("seconds") > 0 < expected["usage"].pop("seconds") and reported == expected
    # asked once more, all is answered by the file
    before = (tmp_path / "m.jsonl").read_bytes()
    again = json.loads(run(STORY, *options, "--resume").stdout)
    assert (again["answer"], again["graph"]) == (reported["answer"], reported["graph"])
    assert (tmp_path / "m.jsonl").read_bytes() == before and read_lines(trail)[0].resumed
    seeded = run(STORY, *options, "--resume", "--seed", "5")
    assert seeded.exit_code == 2 and "of another run: settings" in " ".join(seeded.stderr.split())
    other = run("Mary went to the barn. Where is Mary?", *options, "--resume")
    assert other.exit_code == 2 and "of another run: problem" in " ".join(other.stderr.split())


@pytest.mark.cpu(3)
@pytest.mark.parametrize("strategy", ["progressive", "lemma"])
def test_the_model_that_knows_the_forms_solves_what_a_stranger_types(strategy, tmp_path):
    trail, memory = tmp_path / "trail.jsonl", tmp_path / "memory"
    result = run(STORY, "--strategy", strategy, "--trail", str(trail), "--memory", str(memory))
    assert result.exit_code == 0 and "The hat is in the park.\n\nsolved: " in result.stdout, result.output
    lines = read_lines(trail)
    assert lines[0].models == ("pocket-solver",) and lines[-1].answer == "The hat is in the park."
    # checked with reasons, or planned by look-ups: not asked the same again
    purposes = [line.purpose for line in lines if isinstance(line, Call)]
    assert purposes[0].startswith("solve" if strategy == "progressive" else "plan 1")
    why = [line.why for line in lines if isinstance(line, Decision)]
    assert any("reasons" in item or "stands in the text" in item for item in why)
    again = json.loads(run(STORY, "--strategy", strategy, "--memory", str(memory), "--resume", "--json").stdout)
    assert again["usage"]["calls"] == lines[-1].usage["calls"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_an_agents_run_leaves_a_patch_and_the_folder_as_it_was(tmp_path):
    repo, patch, config = tmp_path / "repo", tmp_path / "fix.patch", tmp_path / "settings.json"
    repo.mkdir()
    (repo / "sums.py").write_text("def add(a, b):\n    return a - b\n")
    (repo / "test_sums.py").write_text("from sums import add\n\n\ndef test_add():\n    assert add(2, 2) == 4\n")
    tiers = {"tier1": 1, "tier2": 2, "tier3": 3, "check_interval": 1, "max_steps": 3}
    config.write_text(json.dumps({"escalation": tiers, "context_chars": 8000}))
    options = ["--repo", str(repo), "--patch", str(patch), "--config", str(config), "--max-tokens", "16"]
    result = run("Mend add.", "--strategy", "agent", *options, "--json")
    reported = json.loads(result.stdout)
    assert result.exit_code == 1, result.output
    assert (reported["solved"], reported["steps"], reported["patch"]) == (False, 3, "")
    assert reported["report"]["failed"] == ["test_sums.py::test_add"] and patch.read_text() == ""
    assert sorted(path.name for path in repo.iterdir()) == ["sums.py", "test_sums.py"]
    resumable = [*options, "--memory", str(tmp_path / "memory.jsonl"), "--json"]
    assert run("Mend add.", "--strategy", "agent", *resumable, "--max-calls", "2").exit_code == 1
    resumed = json.loads(run("Mend add.", "--strategy", "agent", *resumable, "--resume").stdout)
    assert all(resumed[name] == reported[name] for name in ("steps", "why"))
    assert resumed["usage"]["calls"] == reported["usage"]["calls"]


def test_a_model_of_the_same_name_from_elsewhere_is_told_apart(tmp_path):
    shutil.copytree(resolve_model("pocket"), tmp_path / "pocket")
    chats = open_chats("", f"pocket,{tmp_path}/pocket,pocket@http://127.0.0.1:9/v1", None, "cpu", "float32")
    assert {chat.name for chat in chats} == {"pocket"}
    assert [source(chat) for chat in chats] == ["pocket", str(tmp_path / "pocket"), "http://127.0.0.1:9/v1"]


def test_ladders_hand_up_tokens_where_they_can():
    chat, samples = as_ladder(open_chats("pocket", "pocket,pocket-large", None, "cpu", "float32"))
    assert (chat.unit, samples) == ("token", True)
    chat, samples = as_ladder(open_chats("pocket", "pocket,x@http://127.0.0.1:9/v1", None, "cpu", "float32"))
    assert (chat.unit, samples, chat.name) == ("answer", False, "pocket,x")


@pytest.mark.parametrize(
    "options, message",
    [
        (["", "--strategy", "progressive"], "the problem is empty"),
        (["x", "--strategy", "magic"], "no such strategy: 'magic'; there are progressive, lemma, agent"),
        (["x", "--resume"], "--resume needs --memory"),
        (["x", "--repo", "."], "--repo has no meaning with --strategy progressive, only with agent"),
        (["x", "--strategy", "lemma", "--memory", "m.json", "--resume"], "there is no such file"),
        (["x", "--strategy", "lemma", "--graph", "plan.png"], "ends neither in .svg nor in .mmd"),
        (["x", "--strategy", "agent"], "--strategy agent needs --repo FOLDER, got none"),
        (["x", "--config", "FASTEST"], "no such progressive config: 'FASTEST'"),
        (["x", "--strategy", "lemma", "--config", "no.json"], "--config 'no.json' cannot be read"),
        (["x", "--temperature", "-1"], "temperature must be a number of at least 0, got -1"),
        (["x", "--trail", "/no/where/trail.jsonl"], "there is no such folder"),
        (["x", "--ladder", "pocket", "--base-url", "http://x/v1"], "exclude each other"),
        (["x", "--ladder", " , "], "--ladder names no rung"),
        (["x", "--model", "no-such"], "no such model: 'no-such'"),
        (["x", "--max-seconds", "0"], "limit seconds must be above 0"),
        ([STORY, "--memory", "none.json", "--resume"], "cannot be read"),
        (["x", "--trail", "."], "'.' is a folder: name a file"),
        (["x", "--strategy", "agent", "--repo", ".", "--patch", "/tmp"], "'/tmp' is a folder: name a file"),
        ([STORY, "--memory", "m", "--trail", "m"], "have to be different files"),
        (["x"], "a text with a question at its end is needed, got 'x'"),
        (["x\udcff"], "the problem is no UTF-8 text"),
        (["x", "--config", "deep.json"], "'deep.json' cannot be read"),
        (["x", "--strategy", "lemma", "--config", "deep.json"], "'deep.json' cannot be read"),
    ],
)
def test_bad_input_is_told_in_a_line(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deep.json").write_text("[" * 50_000)
    result = run(*options)
    assert result.exit_code == 2 and message in " ".join(result.stderr.split()), result.stderr


def test_equal_decisions_share_a_line(capsys):
    with SolveProgress("progressive") as progress:
        for why in ("the same", "the same", "the same", "another", "the same"):
            progress(Decision("pass", why, {}))
    assert capsys.readouterr().err.splitlines() == [
        "pass: the same", "  and 2 times more", "pass: another", "pass: the same",
    ]  # fmt: skip


def test_a_problem_of_another_world_is_told_first():
    result = run("What is 17 + 25?", "--model", "pocket", "--max-calls", "2")
    assert result.stderr.splitlines()[0].startswith("note: pocket has never seen '17', '25'; it knows ")
    reported = run("What is 17 + 25?")
    assert reported.exit_code == 2 and "as in 'Mary went to the park. Where is Mary?'" in reported.stderr


def test_progress_shows_level_streak_and_gates():
    progress = SolveProgress("progressive", hidden=True)
    with progress:
        progress(Call("solve", "pocket", "low", 1, Completion("x").to_dict()))
        state = {"verification_level": "medium", "consecutive_passes": 2, "iteration": 4, "waits_for": ["iteration 12"]}
        progress(Decision("upgrade", "the verification found no fault", state))
    screen = Console(file=io.StringIO(), width=140)
    screen.print(progress.render())
    text = screen.file.getvalue()
    assert "1 questions" in text and "iteration 5, 2 passes in a row, waits for iteration 12" in text
    assert "upgrade" in text and "found no fault" in text


def test_a_picture_that_could_not_be_drawn_is_refused_before_the_run(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("x", "--strategy", "lemma", "--model", "no-such", "--graph", str(tmp_path / "plan.svg"))
    assert result.exit_code == 2 and "matplotlib" in result.stderr and "no-such" not in result.stderr


def test_trails_of_strangers_steer_no_terminal(tmp_path):
    path = tmp_path / "trail.jsonl"
    trail = Trail(path)
    trail.add(Heading("lemma", "\x1b[31mp", ("[red]m[/",), {}, {}))
    trail.add(Call("solve", "m", "low", 1, {"odd": 1}))
    trail.add(Decision("\x1b[31mx", "\x1b]0;title\x07", {}))
    with path.open("a") as file:
        file.write('{"kind": "decision", "what": "x", "why": "\\ud800", "state": {}}\n')
    shown = command("trail", str(path))
    assert shown.exit_code == 0 and "[red]m[/" in shown.stdout and "\x1b" not in shown.stdout
    deep = tmp_path / "deep"
    deep.write_text("[" * 50_000)
    assert command("trail", str(deep)).exit_code == 2
