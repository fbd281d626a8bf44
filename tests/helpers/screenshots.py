"""Take the screenshots in docs/images of a finished `specdec ablate configs/paper.yaml --out FOLDER` and of a trace.

python -m tests.helpers.screenshots FOLDER
"""

from __future__ import annotations

import base64
import io
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

from specdec import SpeculativeDecoder
from specdec.research.demo import DEMO
from specdec.research.traces.trace import record
from tests.helpers.browser import browser, find_chromium

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
SCHEMES = ("light", "dark")


def shot(page: Any, file: Path, size: tuple[int, int], scheme: str, script: str = "0") -> Image.Image:
    """What a window of this size shows of a file, after a script."""
    width, height = size
    page.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
    page.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    page.open(file)
    page.run(script)
    return Image.open(io.BytesIO(base64.b64decode(page.ask("Page.captureScreenshot")["data"])))


def main(folder: Path) -> None:
    """Write report.png, report_dark.png, report_500.png, token_page.png and token_page_dark.png."""
    chromium = find_chromium()
    if chromium is None:
        sys.exit("no Chromium found: install one, or name it in SPECDEC_CHROMIUM")
    report = folder.resolve() / "report.html"
    decoder = SpeculativeDecoder.from_pretrained("demo-target", "demo-draft", strategies="prompt-lookup,draft-model")
    with tempfile.TemporaryDirectory() as made, browser(chromium, Path(made) / "profile") as page:
        trace = Path(made) / "trace.html"
        names = {"ids": ["demo/1", "demo/0"], "categories": ["code", "code"]}
        record(decoder, DEMO.prompts[1::-1], 64, temperature=0.7, seed=1, **names).to_html(trace)
        hover = "document.querySelectorAll('.t')[5].dispatchEvent(new Event('mouseover', {bubbles: true}))"
        for scheme, end in zip(SCHEMES, ("", "_dark"), strict=True):
            shot(page, report, (1400, 860), scheme).save(IMAGES / f"report{end}.png", optimize=True)
            shot(page, trace, (1000, 640), scheme, hover).save(IMAGES / f"token_page{end}.png", optimize=True)
        plots = "document.querySelector('figure').scrollIntoView()"
        both = Image.new("RGB", (1010, 900))
        for i, scheme in enumerate(SCHEMES):
            both.paste(shot(page, report, (500, 900), scheme, plots), (510 * i, 0))
        both.save(IMAGES / "report_500.png", optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
