from __future__ import annotations

import pytest

from distill_rl.evals.grading.normalize import normalize, split, to_latex


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        ("5", "5"),
        ("$5$", "5"),
        ("$$5$$.", "5"),
        (r"\( 5 \)", "5"),
        (r"\[5\]", "5"),
        ("**$5$**", "5"),
        ("__5__", "5"),
        ("`5`", "5"),
        ("{{5}}", "5"),
        ("$5$ and $6$", "$5$ , $6$"),
        ("{1} + {2}", "{1} + {2}"),
        (r"$\$5$", r"\$5"),
        ("5.", "5"),
        ("5;", "5"),
        ("0.333...", "0.333..."),
        (r"5\text{.}", "5"),
        (r"\therefore \displaystyle{5}", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\underline{\mathbf{5}}", "5"),
        (r"\mathbf{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"{\color{red} 5}", "5"),
        (r"1,\!234,\! 567", "1234567"),
        ("1{,}234", "1234"),
        (r"12\,000", "12000"),
        ("1,2", "1,2"),
        (r"\frac12", r"\frac{1}{2}"),
        (r"\frac1{72}", r"\frac{1}{72}"),
        (r"\frac{270}7", r"\frac{270}{7}"),
        (r"\frac\pi 2", r"\frac{\pi}{2}"),
        (r"\dfrac{1}{2}", r"\frac{1}{2}"),
        (r"\sqrt2", r"\sqrt{2}"),
        ("3*sqrt(2)", r"3*\sqrt{2}"),
        (r"\sqrt[3]{2}", r"\sqrt[3]{2}"),
        (r"\sqrt[3]2x", r"\sqrt[3]{2}x"),
        (r"\left(1,2\right]", "(1,2]"),
        (r"\left\lbrace 1\right\rbrace", r"\{ 1\}"),
        (r"x\leq 3", r"x\le 3"),
        (r"x\lt 3", "x< 3"),
        (r"(1,2) U (3,4)", r"(1,2)\cup (3,4)"),
        (r"x\,y\;z\ w~v", "x y z w v"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
        (r"1 & \phantom -1", "1 & 1"),
        (r"10\mbox{ cm}^2", r"10\text{ cm}^2"),
        (r"10\,\mathrm{cm}", r"10 \text{cm}"),
        (r"\mathrm{i}", "i"),
        (r"\text{13}", "13"),
        (r"\text{5 cm}", "5 cm"),
        (r"\textbf{(A)}", r"\text{(A)}"),
        (r"6, 8\text{, and }10", "6, 8,10"),
        (r"1 \text{ or } 2", "1 ; 2"),
        (r"25 \text{ percent}", r"25\%"),
        ("25%", r"25\%"),
        ("", ""),
    ],
)
def test_one_spelling(answer: str, normal: str) -> None:
    assert normalize(answer) == normal


@pytest.mark.parametrize(
    ("text", "latex"),
    [
        ("2½", r"2\frac{1}{2}"),
        ("⅞", r"\frac{7}{8}"),
        ("x²y⁻¹", "x^2y^{-1}"),
        ("x₁₂", "x_{12}"),
        ("√3", r"\sqrt{3}"),
        ("√(x+1)", r"\sqrt{x+1}"),
        ("∛16", r"\sqrt[3]{16}"),
        ("√π", r"\sqrt{\pi} "),
        ("2πr", r"2\pi r"),
        ("Δ ≥ −5", r"\Delta  \ge  -5"),
        ("27°", r"27^\circ "),
        ("（１，２）", "(1,2)"),
        ("1\u202f000", "1 000"),
        ("𝐀", "A"),
    ],
)
def test_characters_become_latex(text: str, latex: str) -> None:
    assert to_latex(text) == latex


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("1, 2;3", ["1", "2", "3"]),
        (r"(1,2), \{3,4\}, [5,6)", ["(1,2)", r"\{3,4\}", "[5,6)"]),
        ("1,", ["1"]),
        ("", []),
        (r"1)\cup(2", []),
    ],
)
def test_text_is_split_outside_of_brackets(text: str, parts: list[str]) -> None:
    assert split(text) == parts


def test_a_mark_a_thousand_deep_is_removed() -> None:
    assert normalize("{" * 1000 + "5" + "}" * 1000) == "5"
