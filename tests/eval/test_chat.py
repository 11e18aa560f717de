"""The chat and the single question: what they print, remember and refuse."""

import ast
import functools
import http.server
import io
import json
import math
import os
import shutil
import signal
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from data_files import COLOURS, POPE_SUFFIX, QUESTIONS, WARM
from paths import ROOT
from PIL import Image

from llava.asking import Assistant, choose_template, load_assistant, load_picture
from llava.compare import answers
from llava.conversation import conv_templates
from llava.data.preprocess import preprocess
from llava.eval import run_llava
from llava.mm_utils import KeywordsStoppingCriteria
from llava.serve import cli, conversation

ASK = QUESTIONS[0] + POPE_SUFFIX
LINE = QUESTIONS[0]


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


@pytest.fixture
def captioner(tiny, tmp_path):
    """A stage-1 checkpoint, whose template is `plain`."""
    from training import flags

    from llava.train.train import train

    train(flags(tiny, tmp_path / "stage1", 1, max_steps=1, version="plain"))
    return tmp_path / "stage1"


# --- single question --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("colour", COLOURS)
def test_the_answer_is_about_the_picture(ask, images, colour):
    assert ask(image=images / f"{colour}.png").answer == ("Yes" if colour in WARM else "No")


@pytest.mark.slow
def test_a_picture_comes_from_an_address(ask, images):
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=images)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        assert ask(image=f"{address}/blue.png").answer == "No"
        assert f"{address}/none.png" in ask(image=f"{address}/none.png").error
        server.shutdown()


@pytest.mark.parametrize(
    ("query", "flags", "placed"),
    [
        ("Is <image-placeholder> like <image-placeholder>?", (), "Is <image> like <image>?"),
        ("Same?", ("--sep", ";"), "<image>\n<image>\nSame?"),
    ],
)
def test_several_pictures_stand_before_the_question_or_where_it_says(ask, images, monkeypatch, query, flags, placed):
    asked = []
    answer = Assistant.answer
    monkeypatch.setattr(
        Assistant,
        "answer",
        lambda self, turns, *args, **kwargs: asked.append(turns) or answer(self, turns, *args, **kwargs),
    )
    sep = flags[1] if flags else ","
    result = ask(*flags, query=query, image=f"{images / 'red.png'}{sep} {images / 'blue.png'}")
    assert result.status == 0 and asked == [[[{"from": "human", "value": placed}]]]


def test_placeholders_must_agree_with_the_pictures(ask):
    assert "2 times, --image-file names 1 pictures" in ask(query="<image-placeholder> or <image-placeholder>?").error


def test_beams_sampling_and_other_templates_are_taken(ask):
    assert ask("--num_beams", "2").answer == "Yes"
    assert ask("--temperature", "0.7", "--top_p", "0.9").status == 0
    assert ask("--conv-mode", "v1").status == 0


def test_llavas_function_takes_its_callers_arguments(checkpoint, images, capsys):
    args = SimpleNamespace(model_path=checkpoint, model_base=None, model_name="llava", query=ASK, conv_mode=None)
    vars(args).update(image_file=str(images / "red.png"), sep=",", temperature=0, top_p=None, num_beams=1)
    vars(args).update(max_new_tokens=8)
    assert run_llava.eval_model(args) == "Yes" and capsys.readouterr().out == "Yes\n"


def test_a_stage_1_checkpoint_captions_and_says_so(ask, captioner):
    result = ask(model=captioner)
    assert result.status == 0 and "it writes a caption and ignores --query" in result.error


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("/nowhere/x.png", "--image-file /nowhere/x.png: no such file"),
        (__file__, "not a picture in a format that Pillow reads"),
        (str(ROOT), "cannot be read"),
    ],
)
def test_unreadable_pictures_are_named_before_the_model_is_loaded(ask, talk, image, message):
    for result in (ask(image=image, model="/nowhere"), talk("", image=image, model="/nowhere")):
        assert result.status == 2 and message in result.error


def test_a_huge_picture_or_a_format_that_runs_a_program_is_refused(images, tmp_path, monkeypatch):
    (tmp_path / "eps.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    with pytest.raises(ValueError, match=r"eps\.png: not a picture in a format"):
        load_picture(str(tmp_path / "eps.png"))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 200)
    for side in (15, 30):  # of which Pillow warns, and which it refuses
        Image.new("RGB", (side, side)).save(tmp_path / "bomb.png")
        with pytest.raises(ValueError, match=r"bomb\.png: cannot be read \(Image size .* exceeds limit"):
            load_picture(str(tmp_path / "bomb.png"))


def test_a_language_model_without_a_vision_tower_is_refused(ask, talk, tiny):
    model = tiny / "llama"
    for result in (ask("--conv-mode", "v1", model=model), talk(f"{LINE}\n", "--conv-mode", "v1", model=model)):
        assert str(model) in result.error and "has no vision tower" in result.error


def test_the_template_is_the_checkpoints_never_guessed_from_its_path(assistant, caplog):
    config = SimpleNamespace(mm_conv_version="qwen_1_5")
    assert choose_template(config, "llava-llama-2") == conv_templates["qwen_1_5"] == assistant.template
    assert choose_template(config, "x", "qwen_1_5") == conv_templates["qwen_1_5"] and not caplog.messages
    assert choose_template(config, "x", "v1") == conv_templates["v1"]
    assert caplog.messages == ["x: asked in the template v1, but it was trained in qwen_1_5"]
    with pytest.raises(ValueError, match=r"llava-v1\.5-7b: config\.json has no mm_conv_version.*--conv-mode"):
        choose_template(SimpleNamespace(), "llava-v1.5-7b")


def test_the_demos_scoring_asks_the_same_way(assistant, images):
    turns = [{"from": "human", "value": f"<image>\n{ASK}"}, {"from": "gpt", "value": "Yes"}]
    records = [{"image": f"{colour}.png", "conversations": turns} for colour in COLOURS]
    said = answers.answers_under("untouched", assistant, records, images, batch_size=3)
    assert [text for text, _ in said] == ["Yes" if colour in WARM else "No" for colour in COLOURS]
    assert all((value > math.log(0.5)) == (text == "Yes") for text, value in said)  # "Yes" is expected everywhere


# --- chat -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["\n", ""], ids=["empty line", "Ctrl-D"])
def test_a_chat_answers_every_line_and_ends(talk, ending):
    result = talk(f"{LINE}\n{LINE}\n{ending}", "--debug")
    assert result.status == 0 and result.error.count("Traceback") == 0
    assert result.printed.count("USER: ") == 3 and result.printed.count("ASSISTANT: ") == 2
    assert result.printed.endswith("exit...\n")


def test_a_later_turn_is_asked_with_the_history_that_training_would_write(talk, assistant):
    result = talk(f"{LINE}\nReally?\n", "--debug")
    shown = [ast.literal_eval(line) for line in result.printed.splitlines() if line.startswith("{'prompt'")]
    assert len(shown) == 2
    answers = [entry["outputs"] for entry in shown]
    turns = [{"from": "human", "value": f"<image>\n{LINE}"}, {"from": "gpt", "value": answers[0]}]
    turns += [{"from": "human", "value": "Really?"}]
    trained_on = preprocess([*turns, {"from": "gpt", "value": answers[1]}], assistant.tokenizer, assistant.template)
    asked = assistant.prompt_ids(turns)
    assert torch.equal(trained_on.input_ids[: len(asked)], asked)
    assert shown[1]["prompt"] == assistant.prompt_text(turns)
    assert shown[1]["prompt"].count("<image>") == 1 and answers[0] in shown[1]["prompt"]


def test_what_is_streamed_is_the_answer(talk, assistant):
    result = talk(f"{LINE}\n", "--debug")
    streamed = result.printed.split("ASSISTANT: ")[1].splitlines()[0]
    assert streamed == assistant.answer(
        [[{"from": "human", "value": f"<image>\n{LINE}"}]],
        [Image.new("RGB", (20, 16), COLOURS["red"])],
        do_sample=False,
        max_new_tokens=8,
    )[0]  # fmt: skip


@pytest.fixture
def penalised(checkpoint, tmp_path):
    """The checkpoint with a generation_config.json that forbids repetitions, samples, and cannot stream."""
    folder = tmp_path / "penalised"
    shutil.copytree(checkpoint, folder)
    fields = json.loads((folder / "generation_config.json").read_text())
    fields |= {
        "no_repeat_ngram_size": 1,
        "temperature": 0.7,
        "top_k": 3,
        "num_beams": 2,
        "return_dict_in_generate": True,
    }
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return folder


def test_a_chat_names_the_settings_of_the_checkpoints_file_that_it_does_not_use(talk, penalised):
    result, plain = talk(f"{LINE}\n", model=penalised), talk(f"{LINE}\n")
    unused = "no_repeat_ngram_size, temperature, top_k, num_beams, return_dict_in_generate"
    assert result.status == 0 and f"not used: {unused}" in result.error
    assert result.printed == plain.printed


def test_text_appears_as_it_grows_and_without_its_end(monkeypatch, capsys):
    class Scripted:
        """An assistant of the template llava_v0."""

        tokenizer, end, prompt_ids = None, "###", lambda *_: None

        def answer(self, turns, pictures, streamer, **options):
            for piece in ("a red ", "cat ", "sits.###"):
                streamer.on_finalized_text(piece)
            return ["a red cat sits."]

    shown = []
    monkeypatch.setattr("builtins.print", lambda *words, **_: shown.append("".join(words)))
    args = cli.parser().parse_args(["--model-path", "x", "--image-file", "x"])
    turns = conversation.answered(Scripted(), None, conversation.with_question([], LINE), args)
    assert shown == ["ASSISTANT: ", "a red ", "cat ", "sits.", "", ""] and turns[-1]["value"] == "a red cat sits."


def test_the_image_token_is_not_taken_from_the_keyboard(talk):
    result = talk("What is <image>?\n\n")
    assert result.status == 0 and "ask without <image>" in result.error and "ASSISTANT" not in result.printed


def test_a_conversation_beyond_the_context_is_refused_and_chat_continues(talk):
    result = talk(f"{'long ' * 120}\n{LINE}\n")
    assert "error: the conversation has" in result.error and "more than the 512 of" in result.error
    assert result.status == 0 and result.printed.count("ASSISTANT: ") == 1


def shown_prompts(printed):
    return [ast.literal_eval(line)["prompt"] for line in printed.splitlines() if line.startswith("{'prompt'")]


def test_commands_change_the_picture_forget_and_quit(talk, images, monkeypatch):
    pictures = []
    asked = Assistant.answer
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


def test_a_stage_1_checkpoint_cannot_chat(talk, captioner):
    result = talk("Hi\n", model=captioner)
    assert result.status == 2 and "template 'plain'" in result.error and "run_llava" in result.error


def test_the_aspect_ratio_flag_changes_the_pixels(talk, monkeypatch):
    seen = []
    load = conversation.load_chat_assistant
    monkeypatch.setattr(
        conversation, "load_chat_assistant", lambda *args: seen.append((loaded := load(*args)).model.config) or loaded
    )
    talk("", "--image-aspect-ratio", "pad")
    talk("")
    assert [config.image_aspect_ratio for config in seen] == ["pad", "square"]


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
