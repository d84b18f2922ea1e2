"""A page of results: its comparisons have known answers, what a person wrote above it stays, and a wrong file is one sentence."""

import json

import pytest

from kvskim.errors import KvskimError
from kvskim.eval.answers import Answer, Scored
from kvskim.eval.fidelity import Measured, by_text, joined
from kvskim.eval.quality_page import MARK, fidelity_section, made_by, page, paired, ruler_section, without_answers
from kvskim.eval.ruler.join import join_runs
from kvskim.eval.ruler.run import with_tables

ABOUT = dict(command="kvskim eval x", date="day", device="a GPU", torch="2", dtype="float32", layers=3, kv_heads=2, head_dim=64, seconds=12.3)


def row(task, sample, method, setting, score, question=0):
    return Scored(task, 4096, sample, question, 4000, score, Answer(method, setting, "x", 4.0, 0.1, 64.0))


def ruler_result():
    rows = []
    for task, sketch, rki4 in (("vt", (1.0, 0.0), (0.0, 0.0)), ("cwe", (0.5,), (0.75,))):
        for sample, (mine, other) in enumerate(zip(sketch, rki4)):
            rows += [row(task, sample, "full", "all", 1.0), row(task, sample, "sketch", "64 tokens", mine), row(task, sample, "rki4", "64 tokens", other)]
            rows += [row(task, sample, "sketch", "threshold 0.007", 1.0)]
    return with_tables({**ABOUT, "tasks": ["vt", "cwe"], "contexts": [4096, 8192], "heads": 2, "answers": [found.as_dict() for found in rows]})


def test_differences_are_paired_by_sample_and_every_task_weighs_the_same():
    rows = [row("vt", 0, "a", "s", 1.0), row("vt", 0, "a", "s", 0.0, question=1), row("vt", 1, "a", "s", 0.0), row("cwe", 0, "a", "s", 1.0)]
    rows += [row("vt", 0, "b", "s", 0.0), row("vt", 0, "b", "s", 0.0, question=1), row("vt", 1, "b", "s", 0.0), row("cwe", 0, "b", "s", 0.0)]
    rows += [row("vt", 0, "a", "only here", 1.0)]
    found = paired(rows, 4096, "a", "b")
    assert list(found) == ["s"]
    assert found["s"].mean == pytest.approx(((0.5 + 0.0) / 2 + 1.0) / 2)
    assert paired(rows, 4096, "b", "a")["s"].mean == -found["s"].mean
    assert paired(rows, 8192, "a", "b") == {}


def test_a_section_of_ruler():
    text = ruler_section("Tiny", ruler_result(), "sketch", "rki4")
    assert "## RULER, Tiny\n\n`kvskim eval x`, day: a GPU, torch 2, float32, 3 layers, 2 kv heads, head dim 64; 12 s." in text
    assert "### Tiny, 4096 tokens\n\n3 samples, 1 to 2 of each task, the same for every method and setting." in text
    assert "### Tiny, 8192" not in text
    assert "| sketch | 50.0 [" in text
    assert "| rki4 | 37.5 [" in text
    # Task by task: full attention and the default method only.
    assert "| sketch | 64 tokens | 50.0 | 50.0 | 50.0 |" in text
    assert "| rki4 | 64 tokens |" not in text
    assert "sketch minus rki4, in points: 64 tokens 12.5 [" in text
    assert "rki4 minus full, in points: 64 tokens -62.5 [" in text
    assert "oracle" not in text


def run_of(seeds, samples, scores, contexts=(4096,), command="kvskim eval ruler Tiny", **about):
    """A result in which the sketch has, of `vt`, one of ``scores`` in each context for each sample, by its number among the seeds."""
    rows = [
        {**row("vt", number, method, setting, score).as_dict(), "context_tokens": context}
        for context in contexts for number, mine in scores.items() for method, setting, score in (("full", "all", 1.0), ("sketch", "64 tokens", mine))
    ]
    found = dict(tasks=["vt"], contexts=list(contexts), seeds=list(seeds), samples=samples, time_limit=0.0, heads=2, answers=rows)
    return {**ABOUT, "command": command, **found, **about}


def test_runs_with_other_seeds_are_one_table():
    first, second = run_of([0, 1], 3, {0: 1.0, 3: 0.0}), run_of([2], 5, {0: 0.25, 4: 0.75}, (4096, 8192), device="another GPU")
    whole = with_tables(join_runs([("a", first), ("b", second)]))
    assert {row["sample"] for row in whole["answers"]} == {0, 5, 10, 14}
    assert whole["counts"] == {"4096": {"vt": 4}, "8192": {"vt": 2}}
    (_, short), (_, long) = whole["tables"]["4096"], whole["tables"]["8192"]
    assert (short["score"]["mean"], long["score"]["mean"]) == (0.5, 0.5)
    assert short["score"]["low"] < 0.5
    assert (whole["seeds"], whole["contexts"]) == ([0, 1, 2], [4096, 8192])
    text = ruler_section("Tiny", whole, "sketch", "rki4")
    assert "day: a GPU, torch 2, float32, 3 layers, 2 kv heads, head dim 64; 12 s. 2 samples.\n\n`kvskim eval ruler Tiny`, day: another GPU," in text
    assert "; 12 s. 4 samples.\n\n### Tiny, 4096 tokens\n\n4 samples, 4 of each task" in text


def test_a_sample_that_two_runs_have_counts_once():
    first, second = run_of([0], 9, {0: 1.0, 1: 0.0}), run_of([0, 1], 4, {1: 1.0, 2: 0.5, 4: 0.5})
    whole = with_tables(join_runs([("a", first), ("b", second)]))
    assert whole["counts"] == {"4096": {"vt": 4}}
    # Sample 1 as the first run answered it.
    assert whole["tables"]["4096"][1]["score"]["mean"] == 0.5
    assert made_by(whole).endswith("12 s. 2 samples; 1 more are in a run above too, and count as answered there.")
    with pytest.raises(KvskimError, match=r"^c has no sample that the files before it don't have: .*--first-seed 2\)$"):
        join_runs([("a", first), ("b", second), ("c", run_of([0], 2, {0: 0.0, 1: 0.0}))])
    with pytest.raises(KvskimError, match=r"^b has no samples: its run was stopped before the first was answered; leave it out$"):
        join_runs([("a", first), ("b", run_of([5], 2, {}))])
    with pytest.raises(KvskimError, match=r"^b is of another model than a, kv_heads 5 and not 2"):
        join_runs([("a", first), ("b", run_of([7], 1, {0: 0.0}, kv_heads=5))])


def test_every_threshold_of_joined_runs_has_a_column():
    def under(seed, settings, **more):
        answers = [
            row("vt", 0, method, setting, score).as_dict() for method, setting, score in (("full", "all", 1.0), *(("sketch", s, 0.5) for s in settings))
        ]
        return run_of([seed], 1, {}, answers=answers, **more)

    both = ("threshold 0.007", "threshold 0.005")
    text = ruler_section("Tiny", with_tables(join_runs([("a", under(0, both)), ("b", under(1, both))])), "sketch", "full")
    assert "| method | threshold 0.007 | threshold 0.005 |" in text
    assert text.count("\n| sketch | threshold 0.00") == 2
    assert "sketch minus full, in points: threshold 0.007 -50.0 [-50.0, -50.0], threshold 0.005 -50.0 [-50.0, -50.0]." in text
    # Equal commands of two versions with other defaults.
    with pytest.raises(KvskimError, match=r"^b has answers under threshold 0.005, a under threshold 0.007: give it a name of its own$"):
        join_runs([("a", under(0, ["64 tokens", both[0]])), ("b", under(1, ["64 tokens", both[1]]))])
    # Where the engines of all selectors failed, full attention is left.
    assert len(join_runs([("a", under(0, both)), ("b", under(1, ()))])["answers"]) == 4


def test_the_command_joins_files_of_one_name(tmp_path, monkeypatch, capsys):
    several = "kvskim eval ruler Tiny --samples 2 --selectors full,sketch --budgets 64 --device cuda --first-seed 3 --time-limit 9 --json b.json"
    runs = dict(
        a=run_of([0], 2, {0: 1.0}, command="kvskim eval ruler Tiny --budgets 64 --selectors full,sketch --rule budget,threshold"),
        b=run_of([3], 2, {0: 0.5}, command=several), c=run_of([4], 2, {0: 0.0}, command=several + " --limit 8"),
        d=run_of([4], 2, {0: 0.0}, command=several.replace("Tiny", "Other")), e=run_of([4], 2, {0: 0.0}, command="python x.py"),
        f=run_of([4], 2, {0: 0.0}, command=several + " --no-such 1"), g=run_of([4], 2, {0: 0.0}, command=several + " --tau 0.02,0.005"),
        h=run_of([5], 2, {0: 0.0}, command=several + " --tau 5e-3,0.020"), i=run_of([6], 2, {0: 0.0}, command=several + " --tau x"),
    )
    for name, result in runs.items():
        (tmp_path / name).write_text(json.dumps(result), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    code, shown = run(monkeypatch, capsys, "--ruler", "T=a", "--ruler", "Alone=c", "--ruler", "T=b", "--json", "q.json")
    assert code == 0
    assert "## RULER, T\n" in shown.out
    # The same thresholds, otherwise written.
    assert run(monkeypatch, capsys, "--ruler", "T=g", "--ruler", "T=h")[0] == 0
    kept = json.loads((tmp_path / "q.json").read_text(encoding="utf-8"))["ruler"]
    assert {name: result["tables"]["4096"][1]["score"]["mean"] for name, result in kept.items()} == {"T": 0.75, "Alone": 0.0}
    assert [made["command"] for made in kept["T"]["runs"]] == [runs["a"]["command"], several]
    for file, words in (
        ("c", "c was made with --limit 8, a with --limit 0: give it a name of its own"), ("d", "d was made with the model Other, a with the model Tiny"),
        ("g", "g was made with --tau 0.02,0.005, a with --tau "), ("i", "i can't be joined with another file"),
        ("e", "e can't be joined with another file: its command is none of"), ("f", "f can't be joined with another file"),
    ):
        code, shown = run(monkeypatch, capsys, "--ruler", "T=a", "--ruler", f"T={file}")
        assert code == 2
        assert words in shown.err
        assert shown.err.strip().count("\n") == 0


def fidelity_result(settings=("64 tokens", "threshold 0.007")):
    kl = {"oracle": (0.1, 0.2), "near": (0.105, 0.2), "far": (0.05, 0.3)}
    parts = {
        (text, number): {
            (method, setting): Measured(kl=[[kl[method][position] * (1 + 0.5 * (2 * number - 1))] * 4], pages=[3.0 + number])
            for method in kl for setting in settings
        }
        for position, text in enumerate(("prose", "code")) for number in (1, 0)
    }
    return {**ABOUT, "texts": {"prose": 2, "code": 2}, "tokens": 512, "decoded": 4, "by_text": by_text(parts), "rows": []}


def test_a_section_of_fidelity():
    text = fidelity_section("Tiny", fidelity_result())
    assert "windows of 512 tokens (2 of prose, 2 of code), the last 4 decoded" in text
    assert "| oracle | 0.1000 / 0.2000 | 0.1000 / 0.2000, 3.5 / 3.5 pages |" in text
    assert "| far | 0.0500 / 0.3000 (0.50 / 1.50) |" in text
    assert "- 64 tokens: within 1.1 times the oracle on every text: near.\n" in text
    two = fidelity_section("Tiny", fidelity_result(("threshold 0.007", "threshold 0.005")))
    assert "| method | threshold 0.007 | threshold 0.005 |" in two
    assert "- threshold 0.007: within 1.1 times the oracle on every text: near.\n- threshold 0.005: within" in two
    assert "within" not in fidelity_section("Tiny", without_oracle(fidelity_result()))


def without_oracle(result):
    return {**result, "by_text": {name: [r for r in rows if r["method"] != "oracle"] for name, rows in result["by_text"].items()}}


def test_windows_are_joined():
    first, second = ({("a", "s"): Measured(kl=[[value]], divergence=[3])} for value in (1.0, 2.0))
    whole = joined([first, second])
    assert whole["a", "s"].kl == [[1.0], [2.0]]
    assert whole["a", "s"].divergence == [3, 3]
    assert first["a", "s"].kl == [[1.0]]


def test_what_a_person_wrote_stays():
    once = page("# Mine\n\nWords.\n", ["## A\n\nx\n"])
    assert once == f"# Mine\n\nWords.\n\n{MARK}\n\n## A\n\nx\n"
    assert page(once, ["## B"]) == f"# Mine\n\nWords.\n\n{MARK}\n\n## B\n"
    assert page("", ["## B"]).startswith("# Quality\n\n")


def test_what_is_kept_in_the_repository_has_no_single_answers():
    kept = without_answers({**ruler_result(), "rows": [{"kl": 1, "missed_by_layer_and_head": {}}]})
    assert "answers" not in kept
    assert kept["rows"] == [{"kl": 1}]
    assert kept["tables"]["4096"]


def run(monkeypatch, capsys, *arguments):
    from kvskim import cli

    monkeypatch.setattr("sys.argv", ["kvskim", "eval", "page", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code, capsys.readouterr()


def test_the_command(tmp_path, monkeypatch, capsys):
    # As a run leaves it that was stopped: answers, and no table yet.
    stopped = {key: value for key, value in ruler_result().items() if key not in ("tables", "counts")}
    (tmp_path / "r.json").write_text(json.dumps(stopped), encoding="utf-8")
    (tmp_path / "f.json").write_text(json.dumps(fidelity_result()), encoding="utf-8")
    (tmp_path / "q.md").write_text(f"# Mine\n\n{MARK}\n\nformer words", encoding="utf-8")
    code, shown = run(
        monkeypatch, capsys, "--ruler", f"Tiny={tmp_path / 'r.json'}", "--fidelity", f"Tiny={tmp_path / 'f.json'}", "--markdown", str(tmp_path / "q.md"),
        "--json", str(tmp_path / "q.json"), "--plot", str(tmp_path / "q.png"),
    )
    assert code == 0
    text = (tmp_path / "q.md").read_text(encoding="utf-8")
    assert text.startswith(f"# Mine\n\n{MARK}\n\n## Fidelity, Tiny\n")
    assert "sketch minus rki4, in points: 64 tokens 12.5" in text
    assert "former words" not in text
    assert "## RULER, Tiny" in shown.out
    kept = json.loads((tmp_path / "q.json").read_text(encoding="utf-8"))
    assert list(kept["ruler"]["Tiny"]["tables"]) == ["4096"]
    assert (tmp_path / "q.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("arguments", "words"), [
    ([], "there is nothing to put on a page"), (["--fidelity", "a=b", "--plot", "x.png"], "--plot draws a result of --ruler"),
    (["--ruler", "file.json"], "--ruler is 'file.json'; it must be NAME=FILE"), (["--ruler", "a=/nowhere/x"], "--ruler /nowhere/x can't be read ("),
    (["--ruler", "a=other"], "--ruler other is no result of `kvskim eval ruler --json`"), (["--fidelity", "a=broken"], "--fidelity broken can't be read ("),
    (["--ruler", "a=b", "--markdown", "/nowhere/x.md"], "--markdown /nowhere/x.md: the folder"),
])
def test_a_wrong_option_is_one_sentence(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").write_text("{}", encoding="utf-8")
    (tmp_path / "broken").write_text("{", encoding="utf-8")
    code, shown = run(monkeypatch, capsys, *arguments)
    assert code == 2
    assert words in shown.err
    assert shown.err.strip().count("\n") == 0
