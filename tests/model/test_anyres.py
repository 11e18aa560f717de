"""Grids, crops and visual tokens of pictures of any size; tests/upstream holds them against LLaVA-NeXT's numbers."""

import json
import random
from types import SimpleNamespace

import pytest
import torch
from paths import GOLDEN

from llava.analysis.attention import NoMap, picture_grid
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


def test_a_class_token_has_no_place_in_a_map():
    for tokens, count in ((SIDE**2 + 1, SIDE**2 + 1), (SIDE**2, SIDE**2 + 1), (SIDE**2, SIDE**2 - 1)):
        model = SimpleNamespace(crop_rules=lambda tokens=tokens: CropRules(tokens, SIDE, 56))
        with pytest.raises(NoMap, match=f"{count} visual tokens do not fill 4 rows and columns"):
            picture_grid(model, None, count)
    model = SimpleNamespace(crop_rules=lambda: CropRules(SIDE**2, SIDE, 56))
    assert picture_grid(model, None, SIDE**2) == (SIDE, SIDE)


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


def test_what_is_cut_off_is_black_and_what_stays_is_not_all_black():
    """The picture's rows and columns of pixels inside the grid, in patches, against those that are kept."""
    for size in sizes(300):
        some = rules()
        patches, grid = some.patches(some.picture(size)), best_grid(size, GRIDS)
        across, down = min(grid[0], size[0] * grid[1] / size[1]), min(grid[1], size[1] * grid[0] / size[0])
        for shown, remaining, total in ((across, patches.width, grid[0]), (down, patches.height, grid[1])):
            assert (
                abs(remaining - shown / total * (total / 14)) < 3
            )  # patches; whole ones, and equally many on both sides


def test_a_shrunk_grid_has_about_as_many_tokens_as_allowed():
    for most in (1, 2, 5):
        some = rules(f"anyres_max_{most}")
        for size in sizes(300):
            patches = some.patches(some.picture(size))
            width, height = patches.shrunk or (patches.width, patches.height)
            assert width * height <= 1.21 * most * SIDE**2 or min(width, height) == 1
            assert patches.shrunk is None or patches.width * patches.height > 1.21 * most * SIDE**2


def test_newline_has_a_gradient_where_no_row_remains():
    newline = NEWLINE.clone().requires_grad_()
    some = rules()
    stripe = next(s for s in map(some.picture, sizes(300)) if some.visual_tokens(s) == SIDE**2)
    line_up(numbered(stripe.crops), [stripe], some, newline).sum().backward()
    assert torch.equal(newline.grad, torch.zeros(3))


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
    ("value", "message"),
    [
        ("(1x1),(1x2),(2x1)", "expected pairs of pixels"),  # upstream takes all between the first and the last
        ("(1x1),...", "expected pairs of pixels"),
        ("...,(1x1),(2x2)", "expected pairs of pixels"),
        ("nonsense", "expected pairs of pixels"),
        ("__import__('os').getcwd()", "expected pairs of pixels"),
        (None, "--image_grid_pinpoints None: expected pairs of pixels"),
        ([[10, 20, 30]], "expected pairs of pixels"),
        ([[10, 25]], "10 x 25 pixels cannot be cut into squares of the vision tower's 10"),
        ([[0, 10]], "0 x 10 pixels"),
        ([], "no grid"),
    ],
)
def test_what_is_not_a_grid_is_refused(value, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        parse_pinpoints(value, 10)


@pytest.mark.parametrize(
    ("aspect_ratio", "merge_type", "message"),
    [
        ("anyres_max_0", "flat", "'anyres_max_0': expected 'square', 'pad', 'anyres', or 'anyres_max_N'"),
        ("anyres_max", "flat", "expected 'square'"),
        ("highres", "flat", "'highres': expected 'square'"),
        ("anyres", "spatial_maxpool2x2", "'spatial_maxpool2x2': expected flat or spatial_unpad"),
        ("anyres", "spatial", "'spatial': expected flat or spatial_unpad"),
        ("anyres_max_4", "spatial_unpad_anyres_max_4", "anyres_max_N holds the number of crops to shrink to"),
    ],
)
def test_unknown_modes_are_refused(aspect_ratio, merge_type, message):
    with pytest.raises(ValueError, match=message):
        check_modes(aspect_ratio, merge_type)


def test_a_class_token_has_no_place_in_rows():
    with pytest.raises(ValueError, match="--mm_vision_select_feature patch"):
        CropRules(SIDE**2 + 1, SIDE, 56, "anyres", "spatial_unpad", GRIDS)
    assert CropRules(SIDE**2 + 1, SIDE, 56, "anyres", "flat", GRIDS).visual_tokens(Picture(3, (9, 9))) == 3 * 17


@pytest.mark.parametrize(
    ("picture", "some", "message"),
    [
        (Picture(3), rules(), "the size of a picture of 3 crops is missing; pass image_sizes"),
        (Picture(3, (56, 56)), rules(), "56 x 56 pixels.*has 2 crops by image_grid_pinpoints; 3 were given"),
        (Picture(3, (56, 56)), rules("pad", "spatial_unpad", ()), "3 crops was given, but image_aspect_ratio is 'pad'"),
    ],
)
def test_crops_that_do_not_fit_the_size_are_refused(picture, some, message):
    with pytest.raises(ValueError, match=message):
        some.visual_tokens(picture)


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


@pytest.mark.parametrize(
    ("images", "of_size", "placeholders", "message"),
    [
        (crops(3), [(5, 4)], [1, 1], r"2 image placeholders \(\[1, 1\] per sample\) but 1 images"),
        (crops(3, 2), [(5, 4)] * 2, [1], "2 images"),
        (crops(3, 2), [(5, 4)], [1, 1], "image_sizes has 1 entries for 2 images"),
    ],
)
def test_images_or_sizes_of_another_number_are_refused(images, of_size, placeholders, message):
    with pytest.raises(ValueError, match=message):
        match_crops(images, of_size, placeholders)


def test_videos_are_refused_by_name():
    for modalities in (["image", "video"], "video"):
        with pytest.raises(NotImplementedError, match="'video': videos are not supported"):
            refuse_video(modalities)
    refuse_video(["image", "text"])
