"""Pages hold everything they show, let nothing in, and are the same for the same result."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from html.parser import HTMLParser
from math import log10

import pytest
import results_by_hand as by_hand
from documents_by_hand import KINDS, documents

from forerun.answers.analysis.bottlenecks import bottlenecks
from forerun.answers.analysis.setup import Setup
from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.core.network.on_topology import network_of
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_any, load_model
from forerun.describe.plan.plan import Plan
from forerun.interfaces.report import page as page_module
from forerun.interfaces.report.documents import prediction_document
from forerun.interfaces.report.page import (
    Code,
    Document,
    Figures,
    Heading,
    Listing,
    Plot,
    Table,
    Text,
    page,
)
from forerun.interfaces.report.plots import timeline_plot, use_plot

NASTY = by_hand.NASTY
NUMBER = re.compile(r"|(x |[$+\-≥])?[\d.,]+( ?(%|us|ms|s|GiB|GB|MB))?( to .*| \(.*)?!?|inf|unknown|yes|no")
"""a cell of a column of numbers"""


class Elements(HTMLParser):
    """Elements of a page with their attributes, and the text of each script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._inside = tag == "script"
        if self._inside:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.scripts[-1] += data

    def count(self, tag: str) -> int:
        return sum(each == tag for each, _ in self.found)


@pytest.fixture(scope="module")
def nasty() -> dict[str, Elements]:
    return {kind: Elements(page(document).decode()) for kind, document in documents(NASTY).items()}


@pytest.mark.parametrize("kind", KINDS)
def test_names_of_users_stay_text(nasty: dict[str, Elements], kind: str) -> None:
    elements = nasty[kind]
    assert elements.count("script") == 3
    assert elements.count("img") == 0
    assert not [name for _, attributes in elements.found for name in attributes if name.startswith("on")]
    figures = json.loads(elements.scripts[0])
    assert len(figures) == sum(attributes.get("class") == "plot" for _, attributes in elements.found)
    assert strings(figures)
    for text in strings(figures):
        assert not re.search(r"<(?!br>|extra></extra>|/extra>)", text), text


def strings(value: object) -> list[str]:
    if isinstance(value, dict):
        return [text for each in value.values() for text in strings(each)]
    if isinstance(value, list):
        return [text for each in value for text in strings(each)]
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_asks_nobody_for_anything(nasty: dict[str, Elements], kind: str) -> None:
    for _, attributes in nasty[kind].found:
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            assert (attributes.get(name) or "#").startswith(("#", "data:,"))


def test_the_policy_names_the_scripts_of_the_page_and_nothing_else(nasty: dict[str, Elements]) -> None:
    elements = nasty["run"]
    (policy,) = [
        attributes["content"]
        for _, attributes in elements.found
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy is not None
    hashes = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in elements.scripts[1:]]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == " ".join(f"'sha256-{each}'" for each in hashes)
    assert elements.scripts[1].startswith('"use strict"')


@pytest.mark.parametrize("kind", KINDS)
def test_every_axis_has_its_unit_or_names(kind: str) -> None:
    for part in documents("study")[kind].parts:
        if isinstance(part, Plot):
            for name in ("xaxis", "yaxis"):
                axis = part.layout[name]
                values = [trace.get(name[0]) for trace in part.data]
                named = any(isinstance(each, str) for column in values for each in column)
                named |= axis.get("type") == "linear" and "ticktext" in axis
                assert axis["title"]["text"] or named
                assert named or "," in axis["title"]["text"] or "%" in axis["title"]["text"], axis["title"]
            assert part.about


def seen(plot: Plot, side: str) -> list[float]:
    """What a plot shows along an axis: its data, the ends of its bars, and the heights of what is stacked."""
    values: list[float] = []
    stacked: Counter[object] = Counter()
    for trace in plot.data:
        along, across = (trace.get(name, []) for name in (side, "x" if side == "y" else "y"))
        is_length = trace["type"] == "bar" and (trace.get("orientation") == "h") == (side == "x")
        base = trace.get("base", 0.0)
        bases = base if isinstance(base, list) else [base] * len(along)
        if is_length and plot.layout.get("barmode") == "stack":
            stacked.update(dict(zip(across, along, strict=True)))
        elif side == "y" and "stackgroup" in trace:
            stacked.update(dict(enumerate(along)))
        elif is_length:
            values += [end for start, length in zip(bases, along, strict=True) for end in (start, start + length)]
        else:
            values += [value for value in along if isinstance(value, int | float)]
    return values + ([0.0, *stacked.values()] if stacked else [])


@pytest.mark.parametrize("kind", KINDS)
def test_all_of_a_plot_is_in_sight_and_little_of_it_is_empty(kind: str) -> None:
    for plot in (part for part in documents("study")[kind].parts if isinstance(part, Plot)):
        for side in "xy":
            axis = plot.layout[f"{side}axis"]
            values = seen(plot, side)
            if "range" in axis and values:
                if axis.get("type") == "log":
                    values = [log10(each) for each in values]
                least, most = min(values), max(values)
                begin, end = axis["range"]
                assert begin <= least <= most <= end, (plot.about, side)
                from_zero = 0.0 if begin == 0.0 else least
                assert (most - from_zero) > 0.65 * (end - begin), (plot.about, side)


@pytest.mark.parametrize("kind", ["run", "folded run", "prediction", "search", "range"])
def test_plots_over_the_step_begin_and_end_with_it(kind: str) -> None:
    step_ms = by_hand.simulated().prediction.step_time_s * 1e3
    axes = [part.layout["xaxis"] for part in documents("study")[kind].parts if isinstance(part, Plot)]
    over_step = [axis["range"] for axis in axes if axis["title"]["text"] == "time in the step, ms"]
    assert over_step == [[0.0, pytest.approx(step_ms, rel=1e-4)]] * 2  # streams and memory


def test_the_same_document_gives_the_same_bytes() -> None:
    first = {kind: page(document) for kind, document in documents("study").items()}
    page_module._shipped.cache_clear()
    again = {kind: page(document) for kind, document in documents("study").items()}
    assert first == again


def test_parts_are_written_as_they_are() -> None:
    document = Document(
        "A & B",
        "<sub>",
        (
            Figures((("time", "3 s", "fast"),)),
            Heading("One"),
            Text("plain"),
            Text("careful", "warning"),
            Listing(("a", "b < c")),
            Table(("n", "name"), tuple((str(i), "x") for i in range(100)), numeric=frozenset({0}), most=7),
            Heading("Two"),
            Code("a: <b>\n", "how"),
            Heading("Three"),
        ),
    )
    text = page(document).decode()
    assert "<title>A &amp; B</title>" in text
    assert '<p class="warning">careful</p>' in text
    assert "<li>b &lt; c</li>" in text
    assert "The first 7 of 100 rows." in text
    assert text.count('<td class="number">') == 7
    assert text.count("<section") == text.count("</section>") == 3
    assert '<a href="#section-3">Three</a>' in text
    assert "a: &lt;b&gt;" in text


def test_long_steps_make_small_pages() -> None:
    plan = Plan(1024, micro_batch=1, n_microbatches=48, pp=4, dp_shard=2, activation_checkpointing="full")
    setup = Setup(load_model("gpt2-medium"), plan, load_cluster("h100-sxm"))
    simulation = simulate_setup(setup)
    assert len(simulation.flat) > 50_000
    assert len(page(prediction_document(simulation, (), "x"))) < 1_000_000
    plot = timeline_plot(simulation)
    assert 300 < sum(len(trace["x"]) for trace in plot.data) < 10_000


def test_what_a_prediction_knows_has_a_place() -> None:
    where = load_cluster("h100-sxm")
    network = network_of(where, "switch:8@450/300ns,fat-tree:2@50/700ns")
    on_network = Setup(load_model("gpt2-small"), Plan(1024, dp_shard=16), where, network)
    parts = prediction_document(simulate_setup(on_network), (), "").parts
    assert "Network" in [each.text for each in parts if isinstance(each, Heading)]
    images = Setup(load_any("resnet50"), Plan(1, dp_replicate=8, stack="pytorch-vision", zero_stage=0), where)
    tiles = prediction_document(simulate_setup(images), (), "").parts[0]
    assert isinstance(tiles, Figures)
    assert "images/s of a GPU" in [name for name, _, _ in tiles.entries]


def test_thresholds_and_bottlenecks_are_marked() -> None:
    usages = bottlenecks(by_hand.simulated(), network=0.01).usages
    plot = use_plot(usages)
    bars, marks = plot.data
    names = [name.partition(",")[0] for name in bars["y"]]
    marked = [name for name, label in zip(names, bars["y"], strict=True) if "bottleneck" in label]
    assert "network" in marked
    assert marked == [usage.name for usage in usages if usage.is_bottleneck]
    assert marked != names
    assert dict(zip(names, marks["x"], strict=True))["network"] == 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_is_light_and_its_tables_say_what_heads_a_column(nasty: dict[str, Elements], kind: str) -> None:
    assert len(page(documents("study")[kind])) < 1_000_000
    heads = [attributes for tag, attributes in nasty[kind].found if tag == "th"]
    assert heads
    assert all(attributes.get("scope") == "col" for attributes in heads)
    plots = [attributes for _, attributes in nasty[kind].found if attributes.get("class") == "plot"]
    assert all(attributes["role"] and attributes["aria-label"] for attributes in plots)


@pytest.mark.parametrize("kind", ["run", "search", "range"])
def test_pages_split_the_time_of_collectives_into_parts(kind: str) -> None:
    parts = documents("x")[kind].parts
    (table,) = (each for each in parts if isinstance(each, Table) and "protocol" in each.columns)
    assert table.columns[2:8] == ("in all", "wire", "latency", "protocol", "sharing", "waiting")
    assert any("all-reduce" in row[0] for row in table.rows)


def test_every_heading_heads_something_and_columns_of_numbers_hold_numbers() -> None:
    for kind, document in documents("mine").items():
        for part, after in zip(document.parts, (*document.parts[1:], Heading("the end")), strict=True):
            assert not (isinstance(part, Heading) and isinstance(after, Heading)), (kind, part)
        for table in (part for part in document.parts if isinstance(part, Table)):
            assert table.numeric <= set(range(len(table.columns))), (kind, table.columns)
            assert all(len(row) == len(table.columns) for row in table.rows), (kind, table.columns)
            for number in table.numeric:
                cells = {row[number] for row in table.rows}
                assert all(NUMBER.fullmatch(cell) for cell in cells), (kind, table.columns[number], cells)


def headings(document: Document) -> list[str]:
    return [part.text for part in document.parts if isinstance(part, Heading)]


def plotted(document: Document) -> list[str]:
    """The heading above each plot."""
    found, last = [], ""
    for part in document.parts:
        last = part.text if isinstance(part, Heading) else last
        found += [last] if isinstance(part, Plot) else []
    return found


def test_the_plots_of_pages_of_studies_stand_under_their_headings() -> None:
    made = documents("mine")
    assert plotted(made["scaling"]) == ["Efficiency", "Throughput", "Where the step goes at each scale"]
    assert plotted(made["comparison"]) == ["Where the step goes"]
    assert plotted(made["stragglers"]) == ["How step times spread"] * 2
    assert headings(made["comparison"]) == ["Where the step goes", "Every variant", "Configuration"]
    assert headings(made["stragglers"]) == ["How step times spread", "Who the others wait for", "Configuration"]
    assert headings(made["scaling"])[-2:] == ["Every scale", "Configuration"]
