"""How heat maps are drawn: the same cells in pictures and on pages."""

from functools import lru_cache

import documents_by_hand
import numpy as np

from forerun.answers.search.heat import HeatMap, Known, telling_maps
from forerun.interfaces.report.heat_cells import Cell, heat_cells, heat_title, heat_words
from forerun.interfaces.report.pictures_of_results import heat_picture
from forerun.interfaces.report.plots_of_searches import heat_plot

BY_HAND = HeatMap(
    x="tp",
    y="micro_batch",
    x_values=("1", "2", "<b>"),
    y_values=("1", "2"),
    x_left_out=0,
    y_left_out=3,
    objective="time",
    known=np.array([[Known.BEST, Known.BOUND, Known.NOTHING], [Known.TOO_LARGE, Known.BEST, Known.BOUND]], np.int8),
    value=np.array([[0.25, 0.5, np.nan], [93.2, 0.75, 0.3]]),
    simulated=np.array([[0.25, 0.6, np.nan], [np.nan, 0.75, np.nan]]),
    plans=np.array([[12, 3, 0], [5, 1, 2]]),
)


@lru_cache(maxsize=1)
def cells() -> dict[tuple[int, int], Cell]:
    return {(cell.row, cell.column): cell for cell in heat_cells(BY_HAND)}


def test_a_cell_says_what_is_known_of_it():
    assert {place: cell.words for place, cell in cells().items()} == {
        (0, 0): "★ 250",
        (0, 1): "≥ 500",
        (1, 0): "93 GiB",
        (1, 1): "750",
        (1, 2): "≥ 300",
    }
    assert heat_title(BY_HAND) == "Least step time by tp and micro batch, ms"
    assert heat_words(BY_HAND) == "3 more values of micro batch, worse than these, are left out"


def test_the_pointer_gets_all_that_is_known():
    hovers = {place: cell.hover for place, cell in cells().items()}
    assert hovers[0, 0] == "tp 1, micro_batch 1: best plan 250 ms (12 plans)"
    assert hovers[0, 1] == "tp 2, micro_batch 1: at least 500 ms, the best simulated 600 ms (3 plans)"
    assert hovers[1, 0] == "tp 1, micro_batch 2: does not fit, needs at least 93.2 GiB (5 plans)"
    assert hovers[1, 1] == "tp 2, micro_batch 2: best plan 750 ms (1 plan)"


def brightness(colour: str) -> float:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue


def test_better_cells_are_darker_in_grey_print_too_and_words_stand_out():
    shades = {cell.words: brightness(cell.colour) for cell in cells().values()}
    assert shades["★ 250"] < shades["≥ 300"] < shades["≥ 500"] < shades["750"] < shades["93 GiB"]
    assert all(cell.dark == (brightness(cell.colour) < 128) for cell in cells().values())


def test_a_page_draws_every_cell_once_and_escapes_names():
    plot = heat_plot(BY_HAND)
    assert [len(trace["x"]) for trace in plot.data] == [2, 2, 1]
    assert plot.layout["xaxis"]["ticktext"] == ["1", "2", "&lt;b&gt;"]
    assert "the best is tp 1, micro_batch 1: best plan 250 ms" in plot.about
    x, y = plot.layout["xaxis"], plot.layout["yaxis"]
    assert (x["range"], x["tickvals"], y["range"], y["tickvals"]) == ([-0.5, 2.5], [0, 1, 2], [0, 2], [0.5, 1.5])


def test_a_picture_is_the_same_every_time():
    one = heat_picture(BY_HAND)
    assert one.startswith(b"\x89PNG")
    assert one == heat_picture(BY_HAND)


def test_a_search_in_which_nothing_fits_has_no_winner():
    shown = telling_maps(documents_by_hand.found(), 1)[0]
    nothing = HeatMap(
        *(shown.x, shown.y, shown.x_values, shown.y_values, 0, 0, "memory"),
        known=np.full(shown.known.shape, Known.TOO_LARGE, np.int8),
        value=np.full(shown.value.shape, 81.5),
        simulated=np.full(shown.value.shape, np.nan),
        plans=shown.plans,
    )
    assert {cell.words for cell in heat_cells(nothing)} == {"82 GiB"}
    assert heat_plot(nothing).about.endswith("cells")
    assert heat_title(nothing).endswith(", GiB")
