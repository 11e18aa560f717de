"""Grids, crops and visual tokens of pictures of any size; tests/upstream holds them against LLaVA-NeXT's numbers."""

import json
import random

import pytest
import torch
from paths import GOLDEN

from llava.anyres import CropRules, Picture, best_grid, check_modes, parse_pinpoints
from llava.model.pictures import line_up, match_crops, refuse_video

SIDE = 4  # patches per side of a crop
GRIDS = parse_pinpoints("(1x1),...,(4x3)", 56)
MODES = [("anyres", "flat"), ("anyres", "spatial_unpad")]
MODES += [(f"anyres_max_{n}", merge) for n in (1, 2, 9) for merge in ("flat", "spatial_unpad")]
NEWLINE = torch.tensor([-1.0, -1.0, -1.0])


def rules(aspect_ratio="anyres", merge_type="spatial_unpad", grids=GRIDS) -> CropRules:
    return CropRules(SIDE**2, SIDE, 56, aspect_ratio, merge_type, grids)


def sizes(number: int) -> list[tuple[int, int]]:
    """Sizes of all shapes, from stripes of one pixel to large squares."""
    generator = random.Random(0)
    drawn = [(round(10 ** generator.uniform(0, 3.5)), round(10 ** generator.uniform(0, 3.5))) for _ in range(number)]
    return [*drawn, (1, 1), (1, 5000), (5000, 1), (56, 56), (112, 40), (100, 100)]


def numbered(crops: int) -> torch.Tensor:
    """Features [crops, V, 3] that say their crop, row and column."""
    crop, row, column = torch.meshgrid(torch.arange(crops), torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    return torch.stack([crop, row, column], -1).flatten(1, 2).float()


@pytest.mark.parametrize(("aspect_ratio", "merge_type"), MODES)
def test_as_many_tokens_are_lined_up_as_are_counted(aspect_ratio, merge_type):
    some = rules(aspect_ratio, merge_type)
    newline = NEWLINE if some.has_newline else None
    pictures = [some.picture(size) for size in sizes(300)] + [Picture()]
    for picture in pictures:
        assert len(line_up(numbered(picture.crops), [picture], some, newline)) == some.visual_tokens(picture)
    together = torch.cat([numbered(picture.crops) for picture in pictures])
    assert len(line_up(together, pictures, some, newline)) == sum(map(some.visual_tokens, pictures))


def test_rows_of_the_grid_run_through_all_its_crops_and_end_in_a_newline():
    some = rules()
    for size in sizes(100):
        picture = some.picture(size)
        patches = some.patches(picture)
        expected = [[0.0, r, c] for r in range(SIDE) for c in range(SIDE)]  # the whole picture comes first
        for row in range(patches.top, patches.top + patches.height):
            for column in range(patches.left, patches.left + patches.width):
                crop = 1 + row // SIDE * patches.columns + column // SIDE
                expected.append([crop, row % SIDE, column % SIDE])
            expected.append(NEWLINE.tolist())
        assert line_up(numbered(picture.crops), [picture], some, NEWLINE).tolist() == expected


def test_the_chosen_grids_are_upstreams():
    grids = parse_pinpoints("[[336,672],[672,336],[672,672],[1008,336],[336,1008]]", 336)
    for size, best in json.loads((GOLDEN / "images/best_grids.json").read_text()):
        assert list(best_grid(tuple(size), grids)) == best


def test_grids_may_be_written_in_pixels_or_crops():
    pixels = ((10, 20), (20, 10))
    for spelling in ("[[10, 20], [20, 10]]", "[(10,20),(20,10)]", [[10, 20], [20, 10]]):
        assert parse_pinpoints(spelling, 10) == pixels
    assert parse_pinpoints("(1x1),...,(2x3)", 10) == ((10, 10), (10, 20), (10, 30), (20, 10), (20, 20), (20, 30))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: parse_pinpoints("(1x1),(1x2),(2x1)", 10), "expected pairs of pixels"),  # upstream: all between
        (lambda: parse_pinpoints(None, 10), "--image_grid_pinpoints None: expected pairs of pixels"),
        (lambda: parse_pinpoints([[10, 25]], 10), "10 x 25 pixels cannot be cut into squares of the vision tower's 10"),
        (lambda: check_modes("anyres_max_0", "flat"), "'anyres_max_0': expected 'square', 'pad', 'anyres', or"),
        (lambda: check_modes("anyres", "spatial"), "'spatial': expected flat or spatial_unpad"),
        (lambda: CropRules(17, SIDE, 56, "anyres", "spatial_unpad", GRIDS), "--mm_vision_select_feature patch"),
        (lambda: rules().visual_tokens(Picture(3)), "the size of a picture of 3 crops is missing; pass image_sizes"),
        (lambda: rules().visual_tokens(Picture(3, (56, 56))), "has 2 crops by image_grid_pinpoints; 3 were given"),
        (lambda: rules(merge_type="flat").visual_tokens(Picture(3, (56, 56))), "has 2 crops by image_grid_pinpoints"),
        (lambda: rules("pad", grids=()).visual_tokens(Picture(3, (56, 56))), "but image_aspect_ratio is 'pad'"),
        (lambda: match_crops(crops(3), [(5, 4)], [1, 1]), r"2 image placeholders .* but 1 images"),
        (lambda: match_crops(crops(3, 2), [(5, 4)], [1, 1]), "image_sizes has 1 entries for 2 images"),
    ],
)
def test_grids_modes_and_crops_that_do_not_fit_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def crops(*counts: int) -> list[torch.Tensor]:
    return [torch.full((n, 3, 2, 2), float(i)) for i, n in enumerate(counts)]


def test_crops_may_come_per_image_or_as_one_tensor():
    of_size = [(5, 4), (7, 3), (9, 9)]
    for images in (crops(3, 1, 2), [*crops(3), torch.full((3, 2, 2), 1.0), crops(9, 9, 2)[2]]):
        matched, pictures = match_crops(images, of_size, [2, 1])
        assert matched[:, 0, 0, 0].tolist() == [0, 0, 0, 1, 2, 2]
        assert pictures == [Picture(3, (5, 4)), Picture(1, (7, 3)), Picture(2, (9, 9))]
    matched, pictures = match_crops(torch.stack(crops(2, 2)), torch.tensor([[5, 4], [7, 3]]), [1, 1])
    assert matched.shape == (4, 3, 2, 2) and pictures == [Picture(2, (5, 4)), Picture(2, (7, 3))]
    assert match_crops(None, None, [0, 0]) == (None, [])


@pytest.mark.parametrize("of_size", [[(5, 4), (1, 1), (7, 3)], [(5, 4), (7, 3)]], ids=["with it", "without it"])
def test_a_text_only_samples_unused_image_is_left_out(of_size):
    matched, pictures = match_crops(crops(2, 1, 3), of_size, [1, 0, 1])
    assert matched[:, 0, 0, 0].tolist() == [0, 0, 2, 2, 2]
    assert pictures == [Picture(2, (5, 4)), Picture(3, (7, 3))]


def test_videos_are_refused_by_name():
    for modalities in (["image", "video"], "video"):
        with pytest.raises(NotImplementedError, match="'video': videos are not supported"):
            refuse_video(modalities)
    refuse_video(["image", "text"])
