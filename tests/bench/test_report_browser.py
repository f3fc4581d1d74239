"""The report in a headless Chromium: no complaint, no request, columns that sort, both widths and schemes, paper."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ringattn.bench.report.page import html, read_folder

from ..support import chromium
from ..support.report_cases import everything, tainted, write

EXECUTABLE = chromium.found()
pytestmark = [
    pytest.mark.skipif(
        EXECUTABLE is None,
        reason=f"no Chromium: none of {', '.join(chromium.NAMES)} is on the PATH, and {chromium.VARIABLE} names none",
    ),
    pytest.mark.xdist_group("browser"),
]

WIDTHS, SCHEMES = (1280, 390), ("light", "dark")
COLUMN = "Array.from(document.querySelectorAll('#section1 tbody tr'), row => row.cells[0].textContent).join()"
LEAST_TEXT = 8.0  # CSS px
TEXT_SIZES = """Array.from(document.querySelectorAll('.charts svg text'), text => {
    const {a, b} = text.getScreenCTM();  // from the picture's units to the screen's, turned text too
    return [text.textContent, parseFloat(getComputedStyle(text).fontSize) * Math.hypot(a, b)];
})"""
PAPER = 718  # CSS px between the margins of A4
TOO_WIDE = """Array.from(document.querySelectorAll('body *'))
    .filter(one => one.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
    .map(one => one.tagName + ': ' + one.textContent.slice(0, 40))"""
FIRST_HEADER = "document.querySelector('#section1 th')"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two pages: one of harmless strings, one of hostile ones."""
    place = tmp_path_factory.mktemp("pages")
    for name, files in (("harmless", everything()), ("hostile", tainted(everything()))):
        (place / f"{name}.html").write_text(html(read_folder(write(place / name, **files))), encoding="utf-8")
    return place


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Page]:
    assert EXECUTABLE is not None
    with chromium.browser(EXECUTABLE, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.mark.parametrize("name", ["harmless", "hostile"])
def test_nothing_complains_and_nothing_is_asked_of_a_network(page: chromium.Page, folder: Path, name: str) -> None:
    path = folder / f"{name}.html"
    for width in WIDTHS:
        for scheme in SCHEMES:
            page.open(path, width, scheme=scheme)
            assert page.run("document.documentElement.scrollWidth") <= width, (width, scheme)
            assert page.requests() == [path.as_uri()]
            assert page.complaints() == []
    assert page.run("document.scripts.length") == 1


def test_the_scheme_is_the_reader_s(page: chromium.Page, folder: Path) -> None:
    papers = []
    for scheme in SCHEMES:
        page.open(folder / "harmless.html", 1280, scheme=scheme)
        papers.append(page.run("getComputedStyle(document.body).backgroundColor"))
        figure = page.run("getComputedStyle(document.querySelector('.timeline svg path')).fill")
        assert figure == papers[-1]
    assert papers == ["rgb(255, 255, 255)", "rgb(20, 23, 28)"]


def test_columns_sort_by_mouse_and_by_keyboard(page: chromium.Page, folder: Path) -> None:
    page.open(folder / "harmless.html", 1280)
    assert page.run(COLUMN) == "speed,right,late"
    page.run(f"{FIRST_HEADER}.querySelector('button').click()")
    assert (page.run(COLUMN), page.run(f"{FIRST_HEADER}.ariaSort")) == (
        "late,right,speed",
        "ascending",
    )
    page.run(f"{FIRST_HEADER}.querySelector('button').focus()")
    page.press("Enter")
    assert (page.run(COLUMN), page.run(f"{FIRST_HEADER}.ariaSort")) == (
        "speed,right,late",
        "descending",
    )
    page.press("Tab")
    page.press("Enter")  # the next header
    assert page.run(f"{FIRST_HEADER}.ariaSort + {FIRST_HEADER}.nextElementSibling.ariaSort") == "noneascending"
    assert page.complaints() == []


def test_numbers_sort_as_numbers(page: chromium.Page, folder: Path) -> None:
    page.open(folder / "harmless.html", 1280)
    table = "document.querySelector('#section1 table')"  # the third column, in seconds
    for order in ("9.5,90,", "90,9.5,"):  # what says nothing goes last, whichever way
        page.run(f"{table}.tHead.rows[0].cells[2].firstElementChild.click()")
        assert page.run(f"Array.from({table}.tBodies[0].rows, row => row.cells[2].textContent).join()") == order


def test_text_of_plots_can_be_read_on_a_phone(page: chromium.Page, folder: Path) -> None:
    page.open(folder / "harmless.html", min(WIDTHS))
    sizes = dict(page.run(TEXT_SIZES))
    assert len(sizes) > 15 and not {text: size for text, size in sizes.items() if size < LEAST_TEXT}
    # wider than the screen, so that they scroll by themselves
    assert page.run("document.querySelector('.charts .scroll').scrollWidth") > min(WIDTHS)
    assert page.run("document.documentElement.scrollWidth") <= min(WIDTHS)


def test_on_paper_nothing_is_wider_than_the_page(page: chromium.Page, folder: Path) -> None:
    page.open(folder / "harmless.html", PAPER)
    page.emulate("print")
    page.run("dispatchEvent(new Event('beforeprint'))")
    assert page.run("Array.from(document.querySelectorAll('details')).every(one => one.open)")
    assert page.run(TOO_WIDE) == []
    page.emulate("screen")
