"""Sets the factor of a norm that depends on the first visual tokens (the arms `scale`, `gwc_scale`), before training.

Shapes: N images, V visual tokens per image, D LLM hidden size.
"""

import numpy as np
import torch
from torch import nn

from llava.data.dataset import LazySupervisedDataset, Sample
from llava.model.llava_arch import LlavaMetaForCausalLM
from llava.model.multimodal_projector.norm import fit_to_tokens, projector_norm
from llava.model.zero3 import gathered, is_partitioned

FIRST_IMAGES = 8


def fit_norm_to_first_images(model: LlavaMetaForCausalLM, dataset: LazySupervisedDataset, device: torch.device) -> None:
    """Sets the norm's factor so that the visual tokens of the data set's first images have the target norm on average.

    Does nothing for other norms, or for a factor that came with a checkpoint or an adapter. The images do not depend on
    the order of training, so that every rank, seed and batch size finds the same factor.

    Args:
        model: the model, with tower and projector.
        dataset: the training samples.
        device: where the model will be trained.

    Raises:
        ValueError: no sample has an image.
    """
    projector, tower = model.get_model().mm_projector, model.get_model().vision_tower
    norm = projector_norm(projector)
    if norm is None or not norm.measures_tokens or model.config.mm_projector_norm_init_gain is not None:
        return
    with_images = np.flatnonzero(dataset.modality_lengths() > 0)[:FIRST_IMAGES]
    if not len(with_images):
        raise ValueError(
            f"--mm_projector_norm {model.config.mm_projector_norm}: its factor follows from the first visual tokens, "
            "and no sample of --data_path has an image"
        )
    assert isinstance(projector, nn.Sequential)  # its last element is the norm
    images = torch.cat([_whole_pictures(dataset[int(index)]) for index in with_images])[:FIRST_IMAGES]
    for module in (tower, projector):
        if not is_partitioned(module):  # ZeRO-3 has placed what it manages: the tower, but not a new projector
            module.to(device)
    with gathered([*tower.parameters(), *projector.parameters()]), torch.no_grad():
        tokens = tower(images).to(next(projector.parameters()).dtype)
        for layer in list(projector)[:-1]:
            tokens = layer(tokens)
    fit_to_tokens(norm, model.config, tokens.flatten(0, -2))


def _whole_pictures(item: Sample) -> torch.Tensor:
    """The images [n, 3, H, W] of a sample; for an image cut into crops the first crop, which shows the whole image."""
    if "pictures" not in item:
        return item["images"]
    return torch.stack([crops[0] for crops in item["images"].split([p.crops for p in item["pictures"]])])
