"""Published benchmarks on tiny files of their format: what is asked, what right and wrong answers score, and what is said of files that are no good."""

import json

import pytest

from eval_lookup import lookup_model
from kvskim.errors import KvskimError
from kvskim.eval.answers import Answer, ModelAnswerer, score_samples
from kvskim.eval.benchmarks import BENCHMARKS, infinitebench, read_benchmark, run_benchmark
from kvskim.eval.benchmarks import longbench as longbench_tasks
from kvskim.eval.benchmarks.files import hub_records
from kvskim.eval.methods import Calibrations, parse_methods, settings_of
from kvskim.eval.sample import PromptFormat
from tiny import CharacterTokenizer


class Scripted:
    def __init__(self, *answers):
        self.given = iter(answers)

    def answers(self, sample):
        for index, question in enumerate(sample.questions):
            yield index, question, 10, Answer("full", "all", next(self.given), 1.0, 1.0, 1.0)


def write(directory, name, records):
    (directory / name).write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")


def scores(samples, *answers):
    return [row.score for row in score_samples(samples, Scripted(*answers), log=lambda _: None)]


def longbench(**fields):
    return {"input": "Who?", "context": "Long ago Ada wrote.", "answers": ["Ada Lovelace"], "length": 4, "dataset": "d", "language": "en", "all_classes": None,
            "_id": "0", **fields}


def test_longbench(tmp_path):
    (tmp_path / "data").mkdir()
    write(tmp_path / "data", "hotpotqa.jsonl", [longbench(), longbench(answers=["Bob", "Robert"])])
    write(tmp_path / "data", "trec.jsonl", [longbench(input="Question: Where?\nType:", answers=["City"], all_classes=["City", "Date"])])
    write(tmp_path / "data", "passage_count_e.jsonl", [longbench(input="", answers=["7"])])
    write(tmp_path / "data", "lcc.jsonl", [longbench(input="", context="x = 1\n", answers=["y = 2"])])
    write(tmp_path / "data", "multifieldqa_zh.jsonl", [longbench(input="谁？", answers=["北京"])])
    samples = read_benchmark("longbench", tmp_path)
    assert [s.task for s in samples] == ["multifieldqa_zh", "hotpotqa", "hotpotqa", "trec", "lcc", "passage_count_e"]
    by_task = {s.task: s for s in samples}
    assert "Long ago Ada wrote." in samples[1].context
    assert samples[1].questions[0].text.endswith("Question: Who?\nAnswer:")
    assert [by_task[t].questions[0].limit for t in ("hotpotqa", "trec", "lcc", "passage_count_e")] == [32, 64, 64, 32]
    assert [by_task[t].plain for t in ("hotpotqa", "trec", "lcc", "passage_count_e")] == [False, True, True, False]
    assert scores(samples, "北京", "Ada", "Robert", " City\nDate", "y = 2\nz", "7 and 8") == pytest.approx([1, 2 / 3, 1, 1, 1, 0.5])
    assert scores(samples, "上海", "Bob", "Ada", "Date", "", "8") == [0, 0, 0, 0, 0, 0]
    assert len(read_benchmark("longbench", tmp_path, tasks=["hotpotqa"], samples=1)) == 1
    assert read_benchmark("longbench", tmp_path, tasks=["lcc"], limit=7)[0].questions[0].limit == 7


def test_longbench_v2(tmp_path):
    record = {"_id": "0", "context": "A long text.", "question": "Which?", "choice_A": "one", "choice_B": "two", "choice_C": "three", "choice_D": "four",
              "answer": "B", "difficulty": "easy", "length": "short", "domain": "d", "sub_domain": "s"}
    (tmp_path / "data.json").write_text(json.dumps([record, {**record, "answer": "D"}]), encoding="utf-8")
    samples = read_benchmark("longbench-v2", tmp_path)
    assert "(B) two\n(C) three" in samples[0].questions[0].text
    assert scores(samples, "The correct answer is (B).", "The correct answer is (B).") == [1.0, 0.0]


def test_infinitebench(tmp_path):
    write(tmp_path, "passkey.jsonl", [{"id": 0, "context": "c", "input": "What is it?", "answer": ["71432"], "options": []}])
    write(tmp_path, "kv_retrieval.jsonl", [{"id": 0, "context": "{}", "input": "Key: a", "answer": "v-1", "options": ""}])
    write(tmp_path, "longbook_choice_eng.jsonl", [{"id": 0, "context": "b", "input": "Who?", "answer": ["Eve"], "options": ["Ann", "Bea", "Cid", "Eve"]}])
    write(tmp_path, "code_debug.jsonl", [{"id": 0, "context": "def f(): ...", "input": "", "answer": ["g.h"], "options": ["e.f", "g.h", "i.j", "k.l"]}])
    write(tmp_path, "math_calc.jsonl", [{"id": 0, "context": "1 + 2 - 3", "input": "", "answer": [1, 3, 0], "options": []}])
    write(tmp_path, "math_find.jsonl", [{"id": 0, "context": "[1, 2.5]", "input": "The largest?", "answer": [2.5], "options": []}])
    samples = read_benchmark("infinitebench", tmp_path)
    assert [s.task for s in samples] == ["passkey", "kv_retrieval", "longbook_choice_eng", "math_find", "math_calc", "code_debug"]
    by_task = {s.task: s.questions[0] for s in samples}
    assert by_task["longbook_choice_eng"].references == ("D",)
    assert "C. Cid\nD. Eve" in by_task["longbook_choice_eng"].text
    assert by_task["code_debug"].references == ("B", "g.h")
    assert scores(samples, "71432.", '"v-1"', "D", "2.5", "1, 3, 0", "B.") == [1, 1, 1, 1, 1, 1]
    assert scores(samples, "7", "v-12", "A", "1", "1, 2", "A.") == pytest.approx([0, 0, 0, 0, 1 / 3, 0])


def test_scbench_asks_all_its_turns_about_one_context(tmp_path):
    write(tmp_path, "scbench_kv.jsonl", [
        {"id": 0, "context": "{a: b}", "multi_turns": [{"input": "Key: a", "answer": "b1"}, {"input": "Key: c", "answer": "d1"}]},
    ])
    write(tmp_path, "scbench_summary_with_needles.jsonl", [{"id": 0, "context": "t", "multi_turns": [
        {"input": "Sum up.", "answer": "a short text", "task": "scbench_summary"}, {"input": "The key?", "answer": "5", "task": "scbench_passkey"},
    ]}])
    write(tmp_path, "scbench_choice_eng.jsonl", [{"id": 0, "context": "b", "multi_turns": [
        {"input": "Who?", "answer": "Bea", "options": ["Ann", "Bea", "Cid", "Eve"]}, {"input": "Then?", "answer": "C", "options": ["Ann", "Bea", "Cid", "Eve"]},
    ]}])
    kv, choice, both = read_benchmark("scbench", tmp_path)
    assert [len(s.questions) for s in (kv, choice, both)] == [2, 2, 2]
    assert [q.limit for q in both.questions] == [200, 15]
    assert [q.references for q in choice.questions] == [("B",), ("C",)]
    assert scores([kv, choice, both], "x b1 y", "b1", "B", "B", "a short text", "5") == [1, 0, 1, 0, 1, 1]
    with pytest.raises(KvskimError, match=r"--tasks names 'scbench_repoqa'"):
        read_benchmark("scbench", tmp_path, tasks=["scbench_repoqa"])


def test_mathematics(tmp_path):
    write(tmp_path, "test.jsonl", [
        {"problem": "Half of 3?", "solution": r"It is $\boxed{\frac{3}{2}}$.", "answer": r"\frac{3}{2}", "subject": "s", "level": 1, "unique_id": "u"},
        {"problem": "2 + 2?", "solution": r"\boxed{4}", "subject": "s", "level": 1, "unique_id": "v"},
    ])
    (tmp_path / "aime").mkdir()
    write(tmp_path / "aime", "aime_2024.jsonl", [{"ID": "1", "Problem": "Find n.", "Answer": 204}, {"question": "Find m.", "answer": "033"}])
    samples = read_benchmark("math-500", tmp_path)
    assert "Half of 3?" in samples[0].context
    assert scores(samples, r"So \boxed{1.5}", r"So \boxed{5}") == [1, 0]
    assert scores(samples, "dunno", "The answer is 4.") == [0, 1]
    assert scores(read_benchmark("aime", tmp_path / "aime"), r"\boxed{204}", r"\boxed{33}") == [1, 1]


def test_the_table_of_a_benchmark(tmp_path):
    write(tmp_path, "hotpotqa.jsonl", [longbench(), longbench()])
    write(tmp_path, "lcc.jsonl", [longbench(answers=["y"])])
    kept = []
    result, page = run_benchmark(
        read_benchmark("longbench", tmp_path), Scripted("Ada Lovelace", "x", "y"), heads=1, log=lambda _: None, save=kept.append,
    )
    # After every task, for a run that is stopped.
    assert [(len(so_far["answers"]), so_far["table"][0]["tasks"]) for so_far in kept] == [(2, {"hotpotqa": 0.5}), (3, {"hotpotqa": 0.5, "lcc": 1.0})]
    assert result["table"][0]["tasks"] == {"hotpotqa": 0.5, "lcc": 1.0}
    assert "| full | all | 50.0 | 100.0 | 75.0 |" in page


@pytest.mark.parametrize("chat", [False, True])
def test_every_task_has_words_to_ask_with_even_where_its_records_have_none(chat):
    tokenizer = CharacterTokenizer()
    if chat:
        tokenizer.chat_template = "plain"
        tokenizer.apply_chat_template = lambda message, **_: message[0]["content"]
    prompts = PromptFormat(tokenizer)
    for name in longbench_tasks.FORMS:
        sample = longbench_tasks.sample(name, longbench(input="", all_classes=["A"]), "f")
        assert prompts.parts(sample, sample.questions[0])[1], name
    for name in infinitebench.INFINITE_TASKS:
        sample = infinitebench.sample(name, {"context": "c", "input": "", "answer": ["A"], "options": ["A", "B"]}, "f")
        assert prompts.parts(sample, sample.questions[0])[1], name


def test_a_task_that_has_no_room_is_refused_before_any_is_read(tmp_path):
    write(tmp_path, "passkey.jsonl", [{"context": "c " * 300, "input": "What is it?", "answer": ["71432"], "options": []}])
    write(tmp_path, "math_calc.jsonl", [{"context": "1 + 2", "input": "", "answer": [1, 3], "options": []}])
    samples = read_benchmark("infinitebench", tmp_path)
    prompts = PromptFormat(lookup_model().tokenizer, longest=200)
    prompts.check_room(samples[:1])
    with pytest.raises(KvskimError, match=r"in the task math_calc a question of .* 30000 leave no room for a context in the 200 tokens"):
        prompts.check_room(samples)


def test_a_real_answerer_reads_short_and_long_contexts(tmp_path):
    """Contexts of a few tokens, as of mathematics, and ones that must be cut, go through the same model."""
    write(tmp_path, "test.jsonl", [{"problem": "one: 11 two: 22 three", "answer": "22"}])
    model = lookup_model()
    settings = settings_of("budget", [3], [0.007], 0.95)
    methods = parse_methods("full,snapkv,rkv,lazyeviction")
    answerer = ModelAnswerer(model, PromptFormat(model.tokenizer), methods, settings, Calibrations(model, "prompt"))
    result, _ = run_benchmark(read_benchmark("math-500", tmp_path, limit=3), answerer, heads=1, log=lambda _: None)
    assert [row["method"] for row in result["answers"]] == ["full", "snapkv", "rkv", "lazyeviction"]
    (tmp_path / "long").mkdir()
    write(tmp_path / "long", "hotpotqa.jsonl", [longbench(context=" ".join(f"key{i}: {i}" for i in range(300)), answers=["299"])])
    answerer = ModelAnswerer(model, PromptFormat(model.tokenizer, longest=150), parse_methods("full,oracle"), settings, Calibrations(model, "prompt"))
    result, _ = run_benchmark(read_benchmark("longbench", tmp_path / "long"), answerer, heads=1, log=lambda _: None)
    assert {row["prompt_tokens"] for row in result["answers"]} == {150 - 32}


@pytest.mark.parametrize(("text", "words"), [
    ('{"input": "a"\n', "line 1 of .*hotpotqa.jsonl is not JSON .* download it again"),
    ('{"input": "a", "context": "c", "answers": ["x"]}\n{"inp', "line 2 of .*hotpotqa.jsonl is not JSON .* download it again"),
    ("", "hotpotqa.jsonl is empty"), ("version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"), ("[1]\n", "holds no list of records"),
    ('{"input": "a", "answers": ["x"]}\n', "has a record without 'context'; it has 'input', 'answers'"),
    ('{"input": "a", "context": "c"}\n', "has a record without 'answers'"),
])
def test_a_broken_download_is_one_sentence(tmp_path, text, words):
    (tmp_path / "hotpotqa.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(KvskimError, match=words) as error:
        read_benchmark("longbench", tmp_path)
    assert "\n" not in str(error.value)


def test_a_broken_json_list_is_one_sentence(tmp_path):
    (tmp_path / "data.json").write_text('[{"a": 1},\n', encoding="utf-8")
    with pytest.raises(KvskimError, match=r"data.json is not JSON .* line 2.*: the file is damaged or not complete"):
        read_benchmark("longbench-v2", tmp_path)
    (tmp_path / "data.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(KvskimError, match=r"data.json can't be read"):
        read_benchmark("longbench-v2", tmp_path)


def test_missing_things_are_one_sentence(tmp_path):
    with pytest.raises(KvskimError, match=r"'longbenhc' is no benchmark; there are longbench, longbench-v2,"):
        read_benchmark("longbenhc", tmp_path)
    with pytest.raises(KvskimError, match=r"--data .*nothing is no directory"):
        read_benchmark("longbench", tmp_path / "nothing")
    with pytest.raises(KvskimError, match=r"has no file narrativeqa.jsonl, .* and so on, as longbench names its tasks"):
        read_benchmark("longbench", tmp_path)
    write(tmp_path, "lcc.jsonl", [longbench()])
    with pytest.raises(KvskimError, match=r"has no file trec.jsonl, as longbench"):
        read_benchmark("longbench", tmp_path, tasks=["lcc", "trec"])
    with pytest.raises(KvskimError, match=r"--tasks names 'nothing'"):
        read_benchmark("longbench", tmp_path, tasks=["nothing"])
    write(tmp_path, "code_debug.jsonl", [{"context": "c", "answer": ["z"], "options": ["a", "b"]}])
    with pytest.raises(KvskimError, match=r"whose answer 'z' is none of its options"):
        read_benchmark("infinitebench", tmp_path)


def test_the_hub(monkeypatch):
    asked = []

    def load(name, configuration, split):
        asked.append((name, configuration, split))
        return iter([longbench(), longbench()])

    assert len(read_benchmark("longbench", None, tasks=["hotpotqa", "lcc"], samples=1, load=load)) == 2
    assert asked == [("THUDM/LongBench", "hotpotqa", "test"), ("THUDM/LongBench", "lcc", "test")]

    def offline(name, configuration, split):
        raise ConnectionError("Couldn't reach the hub\nat all")

    with pytest.raises(KvskimError, match=r"the data set THUDM/LongBench \(lcc\) can't be had from the hub \(Couldn't reach the hub\): give --data DIR"):
        read_benchmark("longbench", None, tasks=["lcc"], load=offline)
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(KvskimError, match=r"needs the package datasets: give --data DIR"):
        list(hub_records("x", None, "test"))


def test_every_benchmark_has_tasks_and_a_place_on_the_hub():
    assert list(BENCHMARKS) == ["longbench", "longbench-v2", "infinitebench", "scbench", "math-500", "aime"]
    assert [len(b.tasks) for b in BENCHMARKS.values()] == [34, 1, 12, 10, 1, 1]
    assert all("/" in b.hub for b in BENCHMARKS.values())


@pytest.mark.parametrize(("arguments", "words"), [
    (["longbenhc"], "'longbenhc' is no benchmark"), (["longbench", "--data", "/nowhere"], "--data /nowhere is no directory"),
    (["longbench", "--samples", "-1"], "--samples is -1; it must be at least 0"),
    (["longbench", "--tau", "0.007,1.5"], "--tau has '1.5'; a threshold is a number greater than 0 and at most 1"),
    (["math-500", "--markdown", "/nowhere/x.md"], "--markdown /nowhere/x.md: the folder"),
])
def test_a_wrong_option_is_one_sentence(arguments, words, refused):
    refused(words, "eval", "benchmark", *arguments)


def test_the_command(tmp_path, monkeypatch, capsys):
    from kvskim import cli

    write(tmp_path, "hotpotqa.jsonl", [longbench(context=" ".join(f"key{i}: {i}" for i in range(100)), input="key7", answers=["7"])])
    model = lookup_model()
    monkeypatch.setattr("kvskim.cli_eval._load", lambda *arguments: model)
    monkeypatch.setattr("sys.argv", ["kvskim", "eval", "benchmark", "longbench", "demo", "--data", str(tmp_path), "--selectors", "full,oracle",
                                     "--budgets", "64", "--tau", "0.3,0.001", "--calibration", "prompt", "--json", str(tmp_path / "b.json")])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0
    result = json.loads((tmp_path / "b.json").read_text())
    assert result["benchmark"] == "longbench"
    assert [(row["task"], row["setting"]) for row in result["answers"]] == [
        ("hotpotqa", "all"), ("hotpotqa", "64 tokens"), ("hotpotqa", "threshold 0.3"), ("hotpotqa", "threshold 0.001"),
    ]
    assert "| oracle | 64 tokens |" in capsys.readouterr().out
