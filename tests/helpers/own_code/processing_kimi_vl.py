"""The processor of a tiny Kimi-VL: arguments and results as in its repository.

Like the published code it imports a name that transformers 5 has no more, and changes the texts that it is given.
"""

from transformers.feature_extraction_utils import BatchFeature
from transformers.processing_utils import ProcessingKwargs, ProcessorMixin, _validate_images_text_input_order


class KimiVLProcessorKwargs(ProcessingKwargs, total=False):
    _defaults = {"text_kwargs": {"padding": False}, "images_kwargs": {}}


class KimiVLProcessor(ProcessorMixin):
    attributes = ["image_processor", "tokenizer"]
    valid_kwargs = ["chat_template"]
    image_processor_class = "AutoImageProcessor"
    tokenizer_class = "AutoTokenizer"

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
        self.image_token = "<|media_pad|>"
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def __call__(self, images=None, text=None, **kwargs) -> BatchFeature:
        images, text = _validate_images_text_input_order(images, text)
        options = self._merge_kwargs(KimiVLProcessorKwargs, tokenizer_init_kwargs=self.tokenizer.init_kwargs, **kwargs)
        pictures = self.image_processor(images, **options["images_kwargs"]) if images is not None else {}
        text = [text] if isinstance(text, str) else text
        if images is not None:
            tall, wide = self.image_processor.merge_kernel_size
            counts = iter([int(grid.prod()) // (tall * wide) for grid in pictures["image_grid_hws"]])
            for index, one in enumerate(text):
                head, *rest = one.split(self.image_token)
                text[index] = head + "".join(self.image_token * next(counts) + part for part in rest)
        return BatchFeature(data={**self.tokenizer(text, **options["text_kwargs"]), **pictures})

    @property
    def model_input_names(self):
        return [*dict.fromkeys(self.tokenizer.model_input_names + self.image_processor.model_input_names)]
