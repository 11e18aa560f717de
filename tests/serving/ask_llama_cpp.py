"""Answers of llama.cpp to given prompts with a picture each; needs llama-cpp-python, numpy and Pillow, not this tree.

    python ask_llama_cpp.py MODEL.gguf MMPROJ.gguf ASKED.json ANSWERS.json

`ASKED.json`: a list of `{"prompt", "question", "image", "max_new_tokens"}`, the prompt's `<image>` standing for the
picture. `ANSWERS.json`: for each the greedy `answer` to the prompt, its `prompt_ids` (null at the picture), the visual
tokens (`visual`), and `chat_answer`, that to the bare question by the file's own chat template.
"""

import base64
import ctypes
import io
import json
import sys

import llama_cpp
import numpy as np
from llama_cpp import mtmd_cpp as mtmd
from llama_cpp.llama_chat_format import MTMDChatHandler
from PIL import Image


class Asker:
    """A language model and its mmproj."""

    def __init__(self, model: str, projector: str) -> None:
        chat = MTMDChatHandler(projector, verbose=False, use_gpu=False)
        options = {"n_ctx": 4096, "n_threads": 1, "n_threads_batch": 1, "chat_handler": chat}
        self.llama = llama_cpp.Llama(model, verbose=False, **options)
        options = mtmd.mtmd_context_params_default()
        options.use_gpu, options.print_timings, options.n_threads, options.warmup = False, False, 1, False
        self.context = mtmd.mtmd_init_from_file(projector.encode(), self.llama._model.model, options)
        assert self.context, f"{projector} cannot be loaded"
        self.marker = mtmd.mtmd_default_marker().decode()
        self.width = llama_cpp.llama_model_n_embd(self.llama._model.model)
        self.vocabulary = llama_cpp.llama_model_get_vocab(self.llama._model.model)

    def ask(self, prompt: str, question: str, image: str, max_new_tokens: int) -> dict:
        with Image.open(image) as opened:
            picture = opened.convert("RGB")
        pixels = (ctypes.c_uint8 * (3 * picture.width * picture.height)).from_buffer_copy(picture.tobytes())
        bitmap = mtmd.mtmd_bitmap_init(picture.width, picture.height, pixels)
        chunks = mtmd.mtmd_input_chunks_init()
        try:
            marked = prompt.replace("<image>", self.marker).encode()
            text = mtmd.mtmd_input_text(marked, len(marked), True, True)
            bitmaps = (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap)
            assert mtmd.mtmd_tokenize(self.context, chunks, ctypes.byref(text), bitmaps, 1) == 0
            reading = self._read(chunks) | {"answer": self._generate(chunks, max_new_tokens)}
            return reading | {"chat_answer": self._chat(picture, question, max_new_tokens)}
        finally:
            mtmd.mtmd_input_chunks_free(chunks)
            mtmd.mtmd_bitmap_free(bitmap)

    def _chat(self, picture: Image.Image, question: str, max_new_tokens: int) -> str:
        buffer = io.BytesIO()
        picture.save(buffer, "png")
        url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
        greedy = {"temperature": 0.0, "top_k": 1, "repeat_penalty": 1.0, "max_tokens": max_new_tokens}
        completion = self.llama.create_chat_completion([{"role": "user", "content": parts}], **greedy)
        return completion["choices"][0]["message"]["content"].strip()

    def _read(self, chunks: int) -> dict:
        ids, visual = [], []
        for number in range(mtmd.mtmd_input_chunks_size(chunks)):
            chunk = mtmd.mtmd_input_chunks_get(chunks, number)
            if mtmd.mtmd_input_chunk_get_type(chunk) == mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
                count = ctypes.c_size_t()
                tokens = mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(count))
                ids += tokens[: count.value]
            else:
                ids.append(None)
                assert mtmd.mtmd_encode_chunk(self.context, chunk) == 0
                count = mtmd.mtmd_input_chunk_get_n_tokens(chunk) * self.width
                values = np.ctypeslib.as_array(mtmd.mtmd_get_output_embd(self.context), (count,))
                visual = values.reshape(-1, self.width).astype(float).tolist()
        return {"prompt_ids": ids, "visual": visual}

    def _generate(self, chunks: int, max_new_tokens: int) -> str:
        context = self.llama._ctx.ctx
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        past = llama_cpp.llama_pos(0)
        assert mtmd.mtmd_helper_eval_chunks(self.context, context, chunks, 0, 0, 512, True, ctypes.byref(past)) == 0
        tokens = []
        while len(tokens) < max_new_tokens:
            logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, -1), (self.llama.n_vocab(),))
            token = int(logits.argmax())
            if llama_cpp.llama_vocab_is_eog(self.vocabulary, token):
                break
            tokens.append(token)
            batch = llama_cpp.llama_batch_get_one((llama_cpp.llama_token * 1)(token), 1)
            assert llama_cpp.llama_decode(context, batch) == 0
        return self.llama.detokenize(tokens).decode(errors="replace").strip()


if __name__ == "__main__":
    model, projector, asked, answers = sys.argv[1:]
    asker = Asker(model, projector)
    with open(asked) as file:
        answers = [asker.ask(**question) for question in json.load(file)]
    with open(answers, "w") as file:
        json.dump(answers, file)
