"""The one style sheet of the built pages has the rules that can match, in their order."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.book.style_sheet import SHEET, write_one_sheet

PAGE = '<html><head>{links}</head><body><p class="lead" id="top">Text</p>{body}</body></html>'


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "_static" / "styles").mkdir(parents=True)
    return tmp_path


def link(href: str) -> str:
    return f'<link href="{href}" rel="stylesheet"/>'


def gathered(site: Path, css: str, body: str = "", script: str = "") -> str:
    """The one sheet of a site with one page, one sheet, and one script."""
    (site / "_static" / "styles" / "a.css").write_text(css)
    (site / "_static" / "a.js").write_text(script)
    page = PAGE.format(links=link("_static/styles/a.css?v=1"), body=body)
    write_one_sheet(site, {site / "index.html": page})
    return rules_of(site)


def rules_of(site: Path) -> str:
    first, _, rules = (site / SHEET).read_text(encoding="utf-8").partition("\n")
    assert first == '@charset "utf-8";'
    return rules


def test_a_rule_for_a_class_or_an_id_that_no_page_has_is_left_out(site):
    css = ".lead{color:red}.card{color:blue}#top p{margin:0}#bottom{margin:1px}a:hover{top:0}"
    assert gathered(site, css).split("\n") == [
        ".lead{color:red}",
        "#top p{margin:0}",
        "a:hover{top:0}",
        "",
    ]


def test_of_several_selectors_those_that_can_match_stay(site):
    assert gathered(site, ".lead,.card,p.lead .gone,a{top:0}") == ".lead,a{top:0}\n"


def test_what_must_not_match_need_not_exist(site):
    assert gathered(site, "p:not(.gone){top:0}") == "p:not(.gone){top:0}\n"


def test_a_class_that_a_script_sets_or_joins_from_parts_stays(site):
    css = ".show{top:0}.bs-tooltip-end{top:1px}.bs-popover{top:2px}"
    script = 'tip.classList.add("show", "bs-tooltip-" + side)'
    assert gathered(site, css, script=script) == ".show{top:0}\n.bs-tooltip-end{top:1px}\n"


def test_groups_without_a_rule_are_left_out_and_other_at_rules_stay(site):
    css = (
        "@media print{.gone{top:0}}@media (min-width:9px){.gone{top:0}.lead{top:1px}}"
        "@keyframes spin{to{top:0}}"
    )
    assert gathered(site, css) == (
        "@media (min-width:9px){.lead{top:1px}}\n@keyframes spin{to{top:0}}\n"
    )


def test_licenses_stay_and_other_comments_do_not(site):
    css = '@charset "latin-1";/*! MIT */ /* why */ .lead{/* so */top:0}'
    assert gathered(site, css) == "/*! MIT */\n.lead{top:0}\n"


def test_an_imported_sheet_takes_the_place_of_its_import(site):
    (site / "_static" / "basic.css").write_text("p{top:0}")
    css = '@import "../basic.css";.lead{top:1px}'
    assert gathered(site, css) == "p{top:0}\n.lead{top:1px}\n"


def test_addresses_lead_from_the_new_place_to_the_same_files(site):
    css = 'p{background:url(b.png)}a{background:url("../c.png")}i{background:url("data:x,(1)")}'
    assert gathered(site, css) == (
        "p{background:url(styles/b.png)}\n"
        "a{background:url(c.png)}\n"
        'i{background:url("data:x,(1)")}\n'
    )


def test_every_page_links_to_the_one_sheet_and_the_sheets_keep_their_order(site):
    for name in "abc":
        (site / "_static" / f"{name}.css").write_text(f"p{{order:{name}}}")
    pages = {
        site / "index.html": PAGE.format(
            links=link("_static/a.css") + link("_static/c.css"), body=""
        ),
        site / "deep" / "one.html": PAGE.format(
            links="".join(link(f"../_static/{name}.css?v=2") for name in "abc"), body=""
        ),
    }
    first, second = write_one_sheet(site, pages).values()
    assert rules_of(site) == "p{order:a}\np{order:b}\np{order:c}\n"
    assert first.count("stylesheet") == second.count("stylesheet") == 1
    assert ' href="_static/pages.css?v=' in first
    assert ' href="../_static/pages.css?v=' in second


def test_gathering_again_takes_in_a_new_page_and_a_changed_sheet_and_nothing_else(site):
    for name in "ab":
        (site / "_static" / f"{name}.css").write_text(f".lead{{order:{name}}}.card{{top:{name}}}")
    old, new = site / "old.html", site / "new.html"
    page = PAGE.format(links=link("_static/a.css") + link("_static/b.css"), body="")
    before = write_one_sheet(site, {old: page})
    assert write_one_sheet(site, before) == before
    assert rules_of(site) == ".lead{order:a}\n.lead{order:b}\n"

    (site / "_static" / "b.css").write_text(".lead{order:c}")
    another = PAGE.format(links=link("_static/a.css"), body='<i class="card"></i>')
    after = write_one_sheet(site, {**before, new: another})
    assert rules_of(site) == ".lead{order:a}\n.card{top:a}\n.lead{order:c}\n"
    versions = {re.search(r"v=(\w+)", text)[1] for text in after.values()}
    assert len(versions) == 1
    assert versions.pop() not in before[old]


names = st.from_regex(r"x-[a-z]{1,6}", fullmatch=True)


@settings(max_examples=30)
@given(st.dictionaries(names, st.booleans(), min_size=1))
def test_exactly_the_classes_of_the_pages_are_kept(tmp_path_factory, classes):
    site = tmp_path_factory.mktemp("site")
    (site / "_static" / "styles").mkdir(parents=True)
    body = "".join(f'<i class="{name}"></i>' for name, used in classes.items() if used)
    css = gathered(site, "".join(f".{name}{{top:0}}" for name in classes), body)
    assert css == "\n".join(f".{name}{{top:0}}" for name, used in classes.items() if used) + "\n"
