"""``python -m sglang_adaptive report TRACE``: a page of charts from a trace that a server recorded."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.observe.page import page
from sglang_adaptive.observe.summary import summarise
from sglang_adaptive.runtime.trace_reader import read_trace


def main(argv: Sequence[str]) -> int:
    """Write the page and print where it is. Raises AdaptiveError for a trace or a place that does not serve."""
    parser = argparse.ArgumentParser(prog="python -m sglang_adaptive report", description=__doc__)
    parser.add_argument("trace", metavar="TRACE", type=Path, help="written by a server with SGLANG_ADAPTIVE_TRACE=FILE")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="the page (default: TRACE with .html added)")
    options = parser.parse_args(argv)
    output = options.output or options.trace.with_name(options.trace.name + ".html")
    if output.exists() and options.trace.exists() and os.path.samefile(output, options.trace):
        raise AdaptiveError(f"{output} is the trace itself; give another file with -o.")
    text = page(summarise(read_trace(options.trace)), options.trace.name)
    try:
        output.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise AdaptiveError(f"Cannot write {output} ({error.strerror}); give another file with -o.") from error
    print(output)
    return 0
