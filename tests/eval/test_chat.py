"""The chat and the single question: what they print, remember and refuse."""

import ast
import io
import os
import signal
import sys
from types import SimpleNamespace

import pytest
import torch
from data_files import COLOURS, POPE_SUFFIX, QUESTIONS, WARM
from PIL import Image
from training import flags

from llava.asking import Assistant, choose_template, load_assistant
from llava.conversation import conv_templates
from llava.data.preprocess import preprocess
from llava.eval import run_llava
from llava.mm_utils import KeywordsStoppingCriteria
from llava.serve import cli, conversation
from llava.train.train import train

LINE = QUESTIONS[0]
ASK = LINE + POPE_SUFFIX


@pytest.fixture(scope="module")
def checkpoint(trained):
    return str(trained("gwc_layernorm"))


@pytest.fixture(scope="module")
def assistant(checkpoint):
    return load_assistant(checkpoint)


@pytest.fixture
def images(tiny, checkpoint):
    """The folder with `<colour>.png`."""
    return tiny / "data/images"


@pytest.fixture
def ask(checkpoint, images, capsys):
    """A function that runs the single question and returns its status, answer and error."""

    def run(*flags, query=ASK, image=None, model=checkpoint):
        image = image or images / "red.png"
        argv = ["--model-path", str(model), "--image-file", str(image), "--query", query, "--temperature", "0", *flags]
        status = run_llava.main([*argv, "--max_new_tokens", "8"])
        captured = capsys.readouterr()
        return SimpleNamespace(status=status, answer=captured.out.strip(), error=captured.err)

    return run


@pytest.fixture
def talk(checkpoint, images, capsys, monkeypatch):
    """A function that types lines into the chat and returns its status, what it printed and its error."""

    def run(typed, *flags, image=None, model=checkpoint):
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        image = image or images / "red.png"
        argv = ["--model-path", str(model), "--image-file", str(image), "--temperature", "0", "--max-new-tokens", "8"]
        status = cli.main([*argv, *flags])
        captured = capsys.readouterr()
        return SimpleNamespace(status=status, printed=captured.out, error=captured.err)

    return run


# --- single question --------------------------------------------------------------------------------------------------


def test_the_answer_is_about_the_picture_also_by_beams_and_llavas_own_call(ask, images, checkpoint, capsys):
    for colour in COLOURS:
        assert ask("--num_beams", "2", image=images / f"{colour}.png").answer == ("Yes" if colour in WARM else "No")
    args = SimpleNamespace(model_path=checkpoint, model_base=None, model_name="llava", query=ASK, conv_mode=None)
    vars(args).update(image_file=str(images / "red.png"), sep=",", temperature=0, top_p=None, num_beams=1)
    vars(args).update(max_new_tokens=8)
    assert run_llava.eval_model(args) == "Yes" and capsys.readouterr().out == "Yes\n"


@pytest.mark.parametrize(
    ("query", "flags", "placed"),
    [
        ("Is <image-placeholder> like <image-placeholder>?", (), "Is <image> like <image>?"),
        ("Same?", ("--sep", ";"), "<image>\n<image>\nSame?"),
    ],
)
def test_several_pictures_stand_before_the_question_or_where_it_says(ask, images, monkeypatch, query, flags, placed):
    asked, answer = [], Assistant.answer
    monkeypatch.setattr(Assistant, "answer", lambda self, turns, *rest, **options: asked.append(turns) or [""])
    sep = flags[1] if flags else ","
    result = ask(*flags, query=query, image=f"{images / 'red.png'}{sep} {images / 'blue.png'}")
    assert result.status == 0 and asked == [[[{"from": "human", "value": placed}]]]
    monkeypatch.setattr(Assistant, "answer", answer)
    assert "2 times, --image-file names 1 pictures" in ask(query="<image-placeholder> or <image-placeholder>?").error


def test_the_template_is_the_checkpoints_never_guessed_from_its_path(assistant, caplog):
    config = SimpleNamespace(mm_conv_version="qwen_1_5")
    assert choose_template(config, "llava-llama-2") == conv_templates["qwen_1_5"] == assistant.template
    assert choose_template(config, "x", "qwen_1_5") == conv_templates["qwen_1_5"] and not caplog.messages
    assert choose_template(config, "x", "v1") == conv_templates["v1"]
    assert caplog.messages == ["x: asked in the template v1, but it was trained in qwen_1_5"]
    with pytest.raises(ValueError, match=r"llava-v1\.5-7b: config\.json has no mm_conv_version.*--conv-mode"):
        choose_template(SimpleNamespace(), "llava-v1.5-7b")


def test_a_stage_1_checkpoint_captions_and_says_so_and_cannot_chat(ask, talk, tiny, tmp_path):
    train(flags(tiny, tmp_path / "stage1", 1, max_steps=1, version="plain"))
    result = ask(model=tmp_path / "stage1")
    assert result.status == 0 and "it writes a caption and ignores --query" in result.error
    result = talk("Hi\n", model=tmp_path / "stage1")
    assert result.status == 2 and "template 'plain'" in result.error and "run_llava" in result.error


# --- chat -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masking", ["assistant", "upstream"])
def test_a_picture_is_asked_about_where_training_put_it(assistant, monkeypatch, masking):
    monkeypatch.setattr(assistant.model.config, "mm_label_masking", masking, raising=False)
    question = {"from": "human", "value": f"{LINE}\n<image>"}
    record = [question, {"from": "gpt", "value": "Yes"}]
    trained_on = preprocess(record, assistant.tokenizer, assistant.template, label_masking=masking).input_ids
    asked = assistant.prompt_ids([question])
    assert torch.equal(trained_on[: len(asked)], asked)
    red, first = Image.new("RGB", (20, 16), COLOURS["red"]), question | {"value": f"<image>\n{LINE}"}
    same = assistant.log_probabilities([record, [first, record[1]]], [red, red])
    assert (same[0] == pytest.approx(same[1], abs=1e-4)) == (masking == "upstream")


def test_a_batch_of_a_plain_language_model_gives_the_answers_of_its_prompts_alone(tiny):
    plain = load_assistant(str(tiny / "llama"), None, "chatml")
    asked = [[{"from": "human", "value": text}] for text in ("hi", "What is the colour of the sky?", "abc def")]
    options = {"max_new_tokens": 12, "do_sample": False}
    alone = [plain.answer([turns], [], **options)[0] for turns in asked]
    assert plain.answer(asked, [], **options) == alone
    rows = [plain.prompt_ids(turns) for turns in asked]
    right, mask = (torch.nn.utils.rnn.pad_sequence(x, batch_first=True) for x in (rows, [r * 0 + 1 for r in rows]))
    new = plain.model.generate(right, attention_mask=mask, pad_token_id=0, **options)  # padded on the other side
    assert plain.tokenizer.batch_decode(new, skip_special_tokens=True) == [
        plain.tokenizer.decode(plain.model.generate(r[None], pad_token_id=0, **options)[0], skip_special_tokens=True)
        for r in rows
    ]
    records = [[*turns, {"from": "gpt", "value": "yes"}] for turns in asked]
    expected = [plain.log_probabilities([record], [])[0] for record in records]
    assert plain.log_probabilities(records, []) == pytest.approx(expected, abs=1e-4)


def test_a_later_turn_is_asked_with_the_history_that_training_would_write(talk, assistant):
    result = talk(f"{LINE}\nReally?\n", "--debug")
    assert result.status == 0 and result.printed.endswith("exit...\n") and "Traceback" not in result.error
    shown = [ast.literal_eval(line) for line in result.printed.splitlines() if line.startswith("{'prompt'")]
    assert len(shown) == 2
    answers = [entry["outputs"] for entry in shown]
    turns = [{"from": "human", "value": f"<image>\n{LINE}"}, {"from": "gpt", "value": answers[0]}]
    options = {"do_sample": False, "max_new_tokens": 8}
    red = Image.new("RGB", (20, 16), COLOURS["red"])
    assert answers[0] == assistant.answer([turns[:1]], [red], **options)[0]  # what was streamed
    turns += [{"from": "human", "value": "Really?"}]
    trained_on = preprocess([*turns, {"from": "gpt", "value": answers[1]}], assistant.tokenizer, assistant.template)
    asked = assistant.prompt_ids(turns)
    assert torch.equal(trained_on.input_ids[: len(asked)], asked)
    assert shown[1]["prompt"] == assistant.prompt_text(turns)
    assert shown[1]["prompt"].count("<image>") == 1 and answers[0] in shown[1]["prompt"]


def test_what_cannot_be_asked_is_refused_and_the_chat_continues(talk):
    result = talk(f"What is <image>?\n{'long ' * 120}\n{LINE}\n")
    assert "ask without <image>" in result.error and "more than the 512 of" in result.error
    assert result.status == 0 and result.printed.count("ASSISTANT: ") == 1


def shown_prompts(printed):
    return [ast.literal_eval(line)["prompt"] for line in printed.splitlines() if line.startswith("{'prompt'")]


def test_commands_change_the_picture_forget_and_quit(talk, images, monkeypatch):
    pictures, asked = [], Assistant.answer
    monkeypatch.setattr(
        Assistant, "answer", lambda self, turns, seen, **kw: pictures.append(seen[0]) or asked(self, turns, seen, **kw)
    )
    lines = [LINE, "/image /nowhere.png", "Really?", f"/image {images / 'blue.png'}", LINE, "/reset", LINE, "/quit"]
    result = talk("\n".join([*lines, "not read"]), "--debug")
    assert result.status == 0 and result.printed.endswith("USER: exit...\n")
    assert "error: /image /nowhere.png: no such file" in result.error
    assert [picture.getpixel((0, 0)) for picture in pictures] == [COLOURS[c] for c in ("red", "red", "blue", "blue")]
    first, second, other, again = shown_prompts(result.printed)
    assert first in second and first == other == again


@pytest.mark.parametrize("shown", ["", "It is"])
def test_ctrl_c_ends_the_answer_and_not_the_chat(talk, monkeypatch, shown):
    growing = conversation.growing_answer

    def pressed(assistant, turns, picture, stop, args):
        monkeypatch.setattr(conversation, "growing_answer", growing)
        yield from filter(None, [shown])
        os.kill(os.getpid(), signal.SIGINT)
        yield from growing(assistant, turns, picture, stop, args)

    monkeypatch.setattr(conversation, "growing_answer", pressed)
    result = talk(f"{LINE}\n{LINE}\n", "--debug")
    assert result.status == 0 and result.printed.count("ASSISTANT: ") == 2 and "Traceback" not in result.error
    *earlier, last = shown_prompts(result.printed)
    if shown:
        assert "answer stopped" in result.error and len(earlier) == 1 and earlier[0] in last and "It is" in last
    else:
        assert "question dropped" in result.error and last.count(LINE) == 1


@pytest.mark.parametrize("name", sorted(conv_templates))
def test_every_template_says_how_an_answer_ends(assistant, name):
    """The text is what generation stops at, so it must follow every finished answer."""
    ended = assistant._replace(template=conv_templates[name])
    conversation = conv_templates[name].copy()
    conversation.messages = [[conversation.roles[0], "Hi"], [conversation.roles[1], "Hello"]]
    after = conversation.get_prompt().split("Hello")[-1]
    assert ended.end and after.strip(" ").startswith(ended.end)
    ids = torch.tensor([assistant.tokenizer(f"Hello{ended.end}").input_ids])
    assert KeywordsStoppingCriteria([ended.end], assistant.tokenizer, ids[:, :0])(ids).tolist() == [True]
