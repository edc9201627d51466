from __future__ import annotations

import base64
import hashlib
import html as html_escapes
import re
from pathlib import Path

from steelyard.experiment.page.frozen import write_report
from tests.experiment.folders import write_run


def test_the_policy_allows_exactly_the_scripts_and_styles_of_the_file(
    tmp_path: Path,
) -> None:
    write_run(tmp_path / "run", steps=4)
    page = write_report([tmp_path / "run"], tmp_path / "report.html")
    html = page.read_text(encoding="utf-8")
    policies = re.findall(r'Content-Security-Policy" content="([^"]*)"', html)
    assert len(policies) == 1
    rules = dict(
        rule.strip().split(" ", 1) for rule in html_escapes.unescape(policies[0]).split(";")
    )
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert "connect-src" not in rules, "no request to anywhere"

    def digest(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    scripts = re.findall(r'<script(?: type="module")?>(.*?)</script>', html, re.DOTALL)
    styles = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    assert rules["script-src"].split() == [digest(script) for script in scripts]
    assert rules["style-src"].split() == [digest(style) for style in styles]
    assert html.index("Content-Security-Policy") < html.index("<style>") < html.index("<script")
    assert rules["img-src"] == "data: blob:"
