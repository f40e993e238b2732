"""The report as one HTML page that opens offline and prints well: pictures inside, nothing fetched, nothing run."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Mapping, Sequence
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token

from helpers.report.canvas import Plot
from helpers.report.columns import NO_BREAK

# The only HTML that the report's Markdown may hold, on lines of its own.
_FOLD = re.compile(r"^(<details>)?(?:<summary>(.*)</summary>)?(</details>)?$", re.MULTILINE)

_CODE = re.compile(r"<code>[^<]*</code>")

_STYLE = """
body { font: 16px/1.55 system-ui, sans-serif; color: #1a1a1a; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2, h3 { line-height: 1.25; } h2 { margin-top: 2.5rem; border-bottom: 1px solid #ccc; padding-bottom: .3rem; }
h1 + ul { list-style: none; padding: .6rem 1rem; background: #f5f5f5; border-left: 4px solid #0072b2; }
table { border-collapse: collapse; margin: .4rem 0 1rem; font-size: .85rem; display: block; overflow-x: auto; }
th, td { border: 1px solid #ccc; padding: .3rem .55rem; text-align: left; vertical-align: top; }
th { background: #f3f3f3; } img { max-width: 100%; height: auto; }
p:has(+ table) { margin-bottom: .2rem; font-weight: 600; }
code { font-size: .9em; background: #f5f5f5; padding: 0 .2em; } td code { white-space: nowrap; }
table:has(th:nth-child(8)) { font-size: .72rem; } table:has(th:nth-child(8)) :is(th, td) { padding: .2rem .3rem; }
pre { background: #f5f5f5; padding: .8rem; overflow-x: auto; }
details { margin: .3rem 0 1rem; } summary { cursor: pointer; color: #555; }
/* Paper can't scroll: wide tables are set smaller, and captions stay with their tables. */
@page { margin: 13mm; }
@media print {
  body { max-width: none; margin: 0; padding: 0; font-size: 10.5pt; line-height: 1.4; }
  h1, h2, h3, p:has(+ table), p:has(+ details) { break-after: avoid; }
  h2 { margin-top: 1.2rem; } p { margin: .5rem 0; orphans: 3; widows: 3; }
  img { display: block; max-height: 74mm; margin: 0 auto; } img, tr, table, details { break-inside: avoid; }
  table { display: table; overflow: visible; width: 100%; font-size: 8.5pt; }
  th, td { padding: .1rem .3rem; } th { overflow-wrap: normal; hyphens: none; } td { overflow-wrap: break-word; }
  table:has(th:nth-child(8)) { font-size: 7pt; }
  pre { white-space: pre-wrap; overflow-wrap: anywhere; overflow: visible; font-size: 7.5pt; }
}
"""


def render(text: str, plots: Mapping[str, Plot]) -> str:
    """The report's Markdown as a page. Images other than the given plots, links and HTML are left out."""
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table").disable(["link", "autolink", "reference"])
    pictures = {f"figures/{plot.name}.png": plot for plot in plots.values() if plot.drawn}

    def image(_: Any, tokens: Sequence[Token], index: int, *__: Any) -> str:
        token = tokens[index]
        alt = html.escape(token.content.replace("\\", ""))
        plot = pictures.get(str(token.attrGet("src")))
        if plot is None:
            return alt
        data = base64.b64encode(plot.png()).decode()
        return f'<img src="data:image/png;base64,{data}" alt="{alt}">'

    markdown.add_render_rule("image", image)
    body, end = "", 0
    for fold in _FOLD.finditer(text):
        if not fold.group():
            continue
        opening, summary, closing = fold.groups()
        body += markdown.render(text[end : fold.start()]) + (opening or "")
        body += f"<summary>{markdown.renderInline(summary)}</summary>\n" if summary is not None else ""
        body += f"{closing}\n" if closing else ""
        end = fold.end()
    body += markdown.render(text[end:])
    title = html.escape(text.partition("\n")[0].lstrip("# "))
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{title}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n{_CODE.sub(_copyable, body)}</body>\n</html>\n"
    )


def _copyable(code: re.Match[str]) -> str:
    """Plain spaces, so that a command can be pasted; the style keeps it on one line."""
    return code.group().replace(NO_BREAK, " ")
