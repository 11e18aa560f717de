"""Answers to a file of questions: what may be asked, the lines that are written, and going on after an interruption."""

import json
import shutil
from types import SimpleNamespace

import pytest
from data_files import COLOURS, POPE_SUFFIX, QUESTIONS, WARM, encoded, noise, shard, turns
from filelock import FileLock
from PIL import Image
from saved_models import filled

from llava import asking
from llava.asking import Assistant
from llava.eval import answer
from llava.eval.score import read_scored
from llava.model.builder import load_pretrained_model

ASK = QUESTIONS[0] + POPE_SUFFIX
EXPECTED = ["Yes" if colour in WARM else "No" for colour in COLOURS]


@pytest.fixture(scope="module")
def checkpoint(trained):
    return str(trained("gwc_layernorm"))


@pytest.fixture(scope="module")
def babbler(checkpoint, tmp_path_factory):
    """A checkpoint with noisy weights, which says something different about every picture."""
    folder = tmp_path_factory.mktemp("babbler") / "model"
    shutil.copytree(checkpoint, folder)
    filled(load_pretrained_model(checkpoint, None, "llava")[1]).save_pretrained(folder)
    return folder


@pytest.fixture
def images(tiny, checkpoint):
    """The folder with `<colour>.png`."""
    return tiny / "data/images"


@pytest.fixture
def ask(checkpoint, images, tmp_path, capsys):
    """A function from records to the command's status, lines, what it printed and its error."""

    def run(records, *flags, output="answers.jsonl", model=checkpoint):
        data = tmp_path / "questions.jsonl"
        text = "".join(json.dumps(record) + "\n" for record in records)
        if not data.exists() or data.read_text() != text:
            data.write_text(text)
        argv = ["--model-path", str(model), "--data", str(data), "--image-folder", str(images)]
        argv += ["--output", str(tmp_path / output), "--max-new-tokens", "8", *flags]
        try:
            status = answer.main(argv)
        except SystemExit as stop:
            status = stop.code
        file, captured = tmp_path / output, capsys.readouterr()
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return SimpleNamespace(status=status, lines=lines, file=file, out=captured.out, error=captured.err)

    return run


@pytest.fixture
def asked(monkeypatch):
    """The conversations that reach the model, batch by batch; `asked.stop_after(n)` presses Ctrl-C before batch n."""
    calls = []
    original = Assistant.answer
    limit = [10**9]

    def spy(self, conversations, *args, **options):
        if len(calls) == limit[0]:
            raise KeyboardInterrupt
        calls.append(conversations)
        return original(self, conversations, *args, **options)

    monkeypatch.setattr(Assistant, "answer", spy)
    return SimpleNamespace(calls=calls, stop_after=lambda n: limit.__setitem__(0, n))


def line(colour: str, **fields) -> dict:
    """A line of a question file."""
    return {"question_id": f"q-{colour}", "image": f"{colour}.png", "text": ASK} | fields


RECORD = {"id": "blue", "image": "blue.png", "conversations": turns(f"<image>\n{ASK}", "Maybe")}
LINES = [line(colour) for colour in COLOURS]
LONG = [line(colour, question_id=i, text="Why? " * (i * 7 % 11) + "Say it.") for i, colour in enumerate([*COLOURS] * 3)]


def test_a_line_has_the_fields_that_llavas_scripts_read_and_earlier_turns_are_asked(ask, asked):
    said = turns(f"<image>\n{ASK}", "Yes", "Sure?", "Very")
    ask([{"image": "red.png", "conversations": said}], output="talk.jsonl")
    assert asked.calls == [[said[:3]]]
    result = ask([LINES[0], RECORD])
    assert [list(line) for line in result.lines] == [
        ["question_id", "prompt", "text", "answer_id", "model_id", "metadata"]
    ] * 2
    first, second = result.lines
    assert (first["question_id"], first["prompt"], first["text"], first["metadata"]) == ("q-red", ASK, "Yes", {})
    assert second["question_id"] == "blue" and second["metadata"] == {"expected": "Maybe"}
    assert first["model_id"] == second["model_id"] and first["answer_id"] != second["answer_id"]


def test_answers_are_scored_by_the_kind_and_answer_of_their_record(ask):
    records = [
        RECORD | {"image": "red.png", "kind": "yes_no", "conversations": turns(f"<image>\n{ASK}", EXPECTED[0])},
        line("red", question_id="beside", expected=EXPECTED[0].upper()),
        line("blue", expected="never this"),
    ]
    result = ask(records)
    assert [line["metadata"].get("kind") for line in result.lines] == ["yes_no", None, None]
    assert [(answer.group, answer.score) for answer in read_scored(result.file)] == [
        ("yes_no", 1),
        ("exact", 1),
        ("exact", 0),
    ]


def test_rows_of_parquet_and_text_alone_are_asked(ask, tmp_path, images, checkpoint):
    import pyarrow as pa

    rows = [{"bytes": encoded(Image.open(images / f"{c}.png")), "path": None} for c in COLOURS]
    data = shard(tmp_path / "rows.parquet", pa.array(rows), len(rows), turns=turns(f"<image>\n{ASK}", "Maybe"))
    argv = ["--model-path", checkpoint, "--data", str(data), "--output", str(tmp_path / "rows.jsonl")]
    assert answer.main([*argv, "--max-new-tokens", "8"]) == 0
    assert [json.loads(line)["text"] for line in (tmp_path / "rows.jsonl").read_text().splitlines()] == EXPECTED
    assert ask([{"text": "What is 1 + 1?"}, LINES[0]]).lines[1]["text"] == "Yes"


SAMPLINGS = [(), ("--temperature", "1.5", "--top-p", "0.9")]


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_answers_are_the_same_in_the_order_of_the_data_in_any_batch_size(ask, babbler, sampling):
    result = {
        size: ask(LONG, "--batch-size", size, *sampling, output=f"{size}.jsonl", model=babbler).lines
        for size in ("1", "2", "64")
    }
    assert len({line["text"] for line in result["1"]}) > 3
    for lines in result.values():
        assert lines == result["1"] and [line["question_id"] for line in lines] == list(range(len(LONG)))


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_a_rerun_resumes_and_ends_with_the_same_file(ask, asked, babbler, sampling):
    flags = ("--batch-size", "2", *sampling)
    whole = ask(LONG, *flags, model=babbler, output="whole.jsonl").file.read_bytes()
    calls = len(asked.calls)
    asked.calls.clear()
    asked.stop_after(2)
    stopped = ask(LONG, *flags, model=babbler)
    assert stopped.status == 130 and "rerun the same command to resume" in stopped.error and stopped.lines
    asked.stop_after(10**9)
    stopped.file.write_bytes(whole[: len(stopped.file.read_bytes()) + 70])  # killed in a line
    asked.calls.clear()
    assert ask(LONG, *flags, model=babbler).file.read_bytes() == whole and len(asked.calls) < calls


@pytest.mark.slow
def test_other_settings_are_refused_by_name_and_a_finished_file_loads_nothing(ask, asked, trained, monkeypatch):
    before = ask(LINES).file.read_text()
    for records, flags, model, named in (
        (LINES[1:], (), None, "--data was content"),
        (LINES, ("--max-new-tokens", "9"), None, "--max-new-tokens was 8, is 9"),
        (LINES, ("--conv-mode", "v1"), None, "--conv-mode was None, is v1"),
        (LINES, (), trained("none"), "--model-path was "),
    ):
        result = ask(records, *flags, **({"model": model} if model else {}))
        assert result.status == 2 and named in result.error and "or remove this one" in result.error
        assert len(result.error.splitlines()) == 1 and result.file.read_text() == before
    monkeypatch.setattr(asking, "chosen_assistant", None)
    again = ask(LINES, "--batch-size", "3", "--device", "cpu")
    assert again.status == 0 and "finished before, 4 answers" in again.out and len(asked.calls) == 1


@pytest.mark.slow
def test_other_pictures_or_code_are_refused_and_a_moved_folder_is_not(ask, images, tmp_path, monkeypatch):
    moved = tmp_path / "moved"
    shutil.copytree(images, moved)
    ask(LINES)
    assert "finished before" in ask(LINES, "--image-folder", str(moved)).out
    Image.new("RGB", (20, 16), "grey").save(moved / "red.png")
    result = ask(LINES, "--image-folder", str(moved))
    assert result.status == 2 and "--image-folder was pictures " in result.error
    monkeypatch.setattr(answer, "made_by", lambda sources: {"llava (code)": "another"})
    assert "(code) was " in ask(LINES).error


def test_pictures_that_change_during_the_run_leave_no_record(ask, images, monkeypatch):
    answer_all = Assistant.answer

    def exchanged(*args, **options):
        Image.new("RGB", (20, 16), "grey").save(images / "red.png")
        return answer_all(*args, **options)

    monkeypatch.setattr(Assistant, "answer", exchanged)
    before = (images / "red.png").read_bytes()
    result = ask(LINES)
    (images / "red.png").write_bytes(before)
    assert result.status == 2 and "pictures changed during the run" in result.error
    assert "no record of its settings" in ask(LINES).error


def test_a_file_that_was_not_written_here_or_is_written_now_is_left_alone(ask, tmp_path):
    (tmp_path / "answers.jsonl").write_text('{"mine": 1}\n')
    result = ask(LINES)
    assert result.status == 2 and "answers.jsonl.run.json" in result.error and result.lines == [{"mine": 1}]
    with FileLock(tmp_path / ".answers.jsonl.lock"):
        result = ask(LINES)
    assert result.status == 2 and "another process writes it" in result.error


BAD = (
    (line("red", image="none.png"), "none.png does not exist"),
    (line("red", image="cut.png"), "cut.png cannot be decoded"),
    ({"question_id": 9, "image": "red.png", "question": ASK}, "has its words under 'text'"),
    ({"conversations": [{"from": "gpt", "value": "Hi"}]}, "found no turn of 'human'"),
    (line("red", text="<image> <image>"), "2 <image> placeholders but 1 images"),
    (line("red", text="why? " * 200), "more than the 512 of"),
    (["a"], "expected an object, found list"),
    (line("red", expected="red", kind="color"), "kind 'color' is not one of exact"),
    (line("blue", expected=" "), "' ' cannot be the expected answer"),
    (line("red", expected="No"), 'question "q-red" is also'),
)


def test_unanswerable_questions_are_named_before_the_first_answer(ask, asked, images):
    (images / "cut.png").write_bytes(encoded(noise(size=(30, 30)))[:1500])  # its header is whole
    result = ask([LINES[0] | {"expected": "Yes"}, *(record for record, _ in BAD), LINES[1]])
    assert result.status == 2 and f"{len(BAD)} of {len(BAD) + 2} questions cannot be used" in result.error
    for number, (_, message) in enumerate(BAD, 1):
        assert f"questions.jsonl: record {number}" in result.error and message in result.error
    assert not asked.calls and not result.lines
