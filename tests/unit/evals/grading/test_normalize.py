from __future__ import annotations

import pytest

from distill_rl.evals.grading.normalize import normalize, without_delimiters


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        ("5", "5"),
        ("$5$", "5"),
        (r"\$5", "5"),
        ("5 .$", "5"),
        ("1,234,567", "1234567"),
        ("-1,234.5", "-1234.5"),
        (r"1,\!234", "1234"),
        ("1{,}234", "1234"),
        ("1,2", "1,2"),
        ("1,23", "1,23"),
        ("x=5", "5"),
        ("x = 5", "5"),
        (r"\theta = 5", "5"),
        ("f(x) = 2x", "2x"),
        ("x_1 = 5", "5"),
        ("x^2+y^2=4", "x^2+y^2=4"),
        ("xy=4", "xy=4"),
        ("x=1,y=2", "x=1,y=2"),
        (r"\frac12", r"\frac{1}{2}"),
        (r"\frac1{72}", r"\frac{1}{72}"),
        (r"\dfrac{1}{2}", r"\frac{1}{2}"),
        (r"\tfrac{1}{2}", r"\frac{1}{2}"),
        (r"\frac{1}{2}", r"\frac{1}{2}"),
        (r"\sqrt2", r"\sqrt{2}"),
        (r"\sqrt[3]{2}", r"\sqrt[3]{2}"),
        (r"\sqrt{2}", r"\sqrt{2}"),
        (r"10\text{ square feet}", "10"),
        (r"10 \mbox{ cm}^2", "10"),
        (r"90^\circ", "90"),
        (r"90^{\circ}", "90"),
        ("5 dollars", "5"),
        (r"\text{an apple}", "apple"),
        (r"\text{Evelyn}", "Evelyn"),
        (r"\textbf{(A)}", "(A)"),
        (r"\left(1,2\right)", r"\left(1,2\right)"),
        (r"\text{red and blue}", "redandblue"),
        (r"1,\text{ and }2", "1,2"),
        (r"\alpha + 1", r"\alpha+1"),
        ("", ""),
    ],
)
def test_one_spelling(answer: str, normal: str) -> None:
    assert normalize(answer) == normal


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        ("$5$", "5"), ("$$5$$", "5"), (r"\(5\)", "5"), (r"\[ 5 \]", "5"), (" 5 ", "5"),
        ("$5$ and $6$", "$5$ and $6$"), ("$5", "$5"), ("$", "$"), ("$$", "$$"), ("", ""),
    ],
)  # fmt: skip
def test_delimiters_around_the_whole_are_removed(text: str, bare: str) -> None:
    assert without_delimiters(text) == bare
