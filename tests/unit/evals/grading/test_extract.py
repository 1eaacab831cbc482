from __future__ import annotations

import pytest

from distill_rl.evals.grading.extract import final_answer, last_boxed, last_letter, last_number, plain

MUCH = 1 << 18


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so it is $\boxed{5}$.", "5"),
        (r"\boxed{4}, no: \boxed{5}", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed {5}", "5"),
        (r"\boxed{ 5 }", "5"),
        (r"\fbox{5}", "5"),
        ("\\boxed{\n5\n}", "5"),
        (r"\boxed 5$ and more", "5"),
        (r"\boxed 5.", "5"),
        (r"{\boxed 5}.", "5"),
        (r"\boxed5", "5"),
        (r"\boxed\frac{1}{2} ok", r"\frac{1}{2}"),
        (r"\boxed{\text{(A)}}", r"\text{(A)}"),
        (r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{1 \\{2}}", r"1 \\{2}"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{ \fbox{\boxed{5}} }", "5"),
        (r"\boxed{\frac{\boxed{1}}{2}}", r"\frac{{1}}{2}"),
        (r"\boxed{\boxed{1}, \boxed{2}}", "{1}, {2}"),
        (r"in a \boxed{} as asked: \boxed{5}, again \boxed{}", "5"),
        (r"inside \boxed{. So: \boxed{5}", "5"),
        (r"stray } and { and \boxed{5}}", "5"),
        ("\x1b[1m\\bo\x1b[0mxed{\x1b[31m5\x1b[0m}", "5"),
        (r"\boxed{<b>5</b>}", "<b>5</b>"),
        (r"\boxed{5", None),
        (r"\boxed{5} and then \boxed{6", None),
        (r"\boxed{\boxed{5}", "5"),
        (r"\boxed{\frac{1}{2}", None),
        (r"\boxed{}", None),
        (r"\boxed{  }", None),
        (r"\boxed", None),
        (r"\boxed,", None),
        (r"\boxedness{5}", None),
        ("5", None),
        ("", None),
    ],
)
def test_the_last_box(text: str, answer: str | None) -> None:
    assert last_boxed(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("x\nFinal Answer: The final answer is $5$. I hope it is correct.", "$5$"),
        ("Final Answer: The final answer is $5$. I hope it is correct.\n\nFinal Answer: The final answer is 6. I hope it is correct.", "$5$"),
        ("final answer: the final answer is: 5. I hope it is correct", "5"),
        ("Final Answer:\nThe final answer is\n$5$.\nI hope it is correct.", "$5$"),
        ("Final Answer: The final answer is 2.5. I hope it is correct.", "2.5"),
        ("Final Answer: The final answer is $5$.\nAnd so on", "$5$"),
        ("Final Answer: The final answer is . I hope it is correct.", None),
        ("Final Answer: The final answer is", None),
        ("The final answer is $5$. I hope it is correct.", None),
        ("", None),
    ],
)  # fmt: skip
def test_the_final_answer(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("Answer: B", "B"),
        ("Answer: A\nno\nAnswer: B", "B"),
        ("answer:B", "B"),
        ("ANSWER : B.", "B"),
        ("**Answer: B**", "B"),
        ("**Answer:** B", "B"),
        ("Answer: **B**", "B"),
        ("Answer: (B)", "B"),
        ("Answer: (b).", "B"),
        ("Answer: b", "B"),
        ("Answer: b  \nThank you", "B"),
        ("Answer: B) because", "B"),
        ("Answer: B, because", "B"),
        ("Answer:\nB", "B"),
        (r"Answer: \boxed{B}", "B"),
        (r"Answer: $\boxed{\text{(B)}}$", "B"),
        (r"Answer: \(B\)", "B"),
        ("Answer: <b>B</b>", "B"),
        ("Answer：B", "B"),
        ("\x1b[1mAnswer: \x1b[31mB\x1b[0m", "B"),
        ("Answer: B\nAnswer: none of them", "B"),
        ("Answer: _B_", "B"),
        ("Answer: __B__", "B"),
        ("Answer: <B>", "B"),
        ("Answer: <B>.", "B"),
        ("Answer: <i><B></i>", "B"),
        ("Answer: <B>C</B>", "C"),
        ("Answer: 𝐁", "B"),
        ("Answer: Ｂ", "B"),
        ("Answer: B_1", None),
        ("Answer: a cat", None),
        ("Answer: Because", None),
        ("Answer: E", None),
        ("Answer B", None),
        ("B", None),
        ("Answer:", None),
        ("", None),
    ],
)
def test_the_last_letter(text: str, letter: str | None) -> None:
    assert last_letter(text) == letter


def test_other_letters_can_be_requested() -> None:
    assert last_letter("Answer: J", letters="ABCDEFGHIJ") == "J"
    assert last_letter("Answer: C", letters="AB") is None


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 * 6 = <<3*6=18>>18\n#### 18", "18"),
        ("#### 18\nThe answer is 19. And 20", "18"),
        ("#### $1,234,567", "1234567"),
        ("#### -5", "-5"),
        ("The answer is 18. It took 3 steps", "18"),
        ("The answer is 17. No, the answer is 18.", "18"),
        ("the answer is: **$1,000.50** for 7 days", "1000.50"),
        (r"The answer is \(\boxed{42}\), see 7", "42"),
        ("Answer: 42 (of 50)", "42"),
        ("The answer is x = 5, not 7", "5"),
        ("The answer is 5 + 3 = 8.", "8"),
        ("The answer is 5 x 3 = 15.", "15"),
        ("The answer is 5 X $3 = $15.", "15"),
        ("The answer is 5x3 = 15.", "15"),
        (r"The answer is 5 \times 3 = 15.", "15"),
        (r"The answer is $5 \cdot \$3 = \$15$.", "15"),
        ("The answer is 5 × (1 + 2) = 15.", "15"),
        ("The answer is 15 ÷ 3 = 5", "5"),
        ("The answer is 5 xylophones, of 7", "5"),
        ("The answer is 5 (3 are red)", "5"),
        ("The answer is 5 - of 7", "5"),
        ("The answer is 2 1/2 of 3", "2 1/2"),
        ("The answer is unclear, I say 7", "7"),
        ("16 - 3 - 4 = 9", "9"),
        ("16-9", "9"),
        ("10-12", "12"),
        ("it is −5 degrees", "-5"),
        ("it is (-5)", "-5"),
        ("-$3", "-3"),
        ("$-3", "-3"),
        (r"\$1,000", "1000"),
        (r"1{,}000", "1000"),
        (r"1,\!000", "1000"),
        (r"12\,000", "12000"),
        ("50%", "50"),
        ("3.", "3"),
        ("72.00 dollars.", "72.00"),
        ("costs $.50", ".50"),
        ("1/2", "1/2"),
        (r"\frac{3}{4}", "3/4"),
        (r"-\dfrac{3}{4}", "-3/4"),
        (r"\frac { -3 } { 4 }", "-3/4"),
        ("so 2 1/2 cups", "2 1/2"),
        ("-2 1 / 2", "-2 1/2"),
        (r"$2\frac{1}{2}$", "2 1/2"),
        (r"\$2 \dfrac{1}{2}", "2 1/2"),
        ("2, 1/2", "1/2"),
        ("2.5 1/2", "1/2"),
        ("1.5e3", "1.5e3"),
        ("1,2 and 3,4", "4"),
        ("<b>18</b>", "18"),
        ("\x1b[32m18\x1b[0m", "18"),
        ("4\u200b2", "42"),
        ("#### 5 + 3 = 8", "8"),
        ("#### 5 + 3 = 4 + 4 = 8", "8"),
        ("#### 5 + 3 = 8, not 9", "8"),
        ("#### $10 * 2 = **$20**", "20"),
        ("#### 10*2=<<10*2=20>>20", "20"),
        ("#### 5 apples + 3 apples = 8 apples", "8"),
        ("#### (5 + 3) / 2 = 4", "4"),
        ("#### 8 apples and 3 pears", "8"),
        ("#### 8 (x = 3)", "8"),
        ("It is 8.\n#### 5 + 3", "3"),
        ("The answer is $9 + $9 = $18. It took 9 days.", "18"),
        ("#### 1. Eggs left\n16 - 7 = 9\n#### 2. Daily earnings\n9 * 2 = 18. **The answer is 18.**", "18"),
        ("#### 1) Eggs left\n9\n#### **2.** Daily earnings\n9 * 2 = 18", "18"),
        ("#### 18\n#### 2. *Check* it", "18"),
        ("#### 18.\nEggs", "18"),
        ("#### **18.**\n\n2 eggs", "18"),
        ("#### 18. (2 eggs)", "18"),
        ("#### (18) dollars for 7 days", "18"),
        ("#### $18. He has 2", "18"),
        ("#### $18.00", "18.00"),
        ("#### 1.5 eggs for 3", "1.5"),
        ("#### 180. It took 7 days", "180"),
        ("#### 9 * 2 = 18. He has 7", "18"),
        ("#### 1,234 eggs, 5", "1234"),
        ("#### 1,00,000", "100000"),
        ("#### 12,34,56,789.5", "123456789.5"),
        ("#### 1,000,000", "1000000"),
        ("#### 2½ hours", "2 1/2"),
        ("#### ¾", "3/4"),
        ("#### １８", "18"),
        ("#### 1\u202f500", "1500"),
        ("an area of 50 m^2", "50"),
        ("an area of 50 m²", "50"),
        ("no number", None),
        ("", None),
    ],
)
def test_the_last_number(text: str, number: str | None) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x9b31mred", "red"),
        ("\x1b]never ended, and so text", "never ended, and so text"),
        ("a\x00b\x08c\x7f", "abc"),
        ("a\tb\r\nc\rd\n", "a\tb\nc\nd\n"),
        ("\u202eabc\u2066\ufeff", "abc"),
        ("plain – ünïcode 中", "plain – ünïcode 中"),
    ],
)
def test_plain_text(text: str, rest: str) -> None:
    assert plain(text) == rest


@pytest.mark.parametrize(
    "piece",
    [
        "\\boxed{", "\\boxed{}", "\\boxed ", "\\boxed", "\\boxed{ ", "\\boxed{x}", "{", "}", "\\", "\\boxed x{", "\\boxed\t",
        "Final Answer:", "Final Answer: ", "Final Answer: The final answer is ", "I hope it is correct", " ", "\n", "\r",
        "Answer:", "answer ", "Answer: *", "Answer: (", "Answer: a ", "answer is ", "answer: 1+", "answer: <b", "**", "$",
        "#### 1+", "#### 1 + 1 =", "#### 1 a +", "answer: 1 + 1 = ", "<<", "<<1", "1^", "1^{", "½", "√", "√(", "²", "Answer: <", "Answer: <B", "_",
        "####", "#### ", "#### -", "#### 1. ", "#### 1.*", "#### *1.*", "1", "1,234", "1,", "1.", "-", "- ", "$ ", "1/", "1e", "1 / ", "1 1 ", "1 1/", "1 \\frac{", "\\frac{", "\\frac{1}{",
        "0" * 50 + "{,}", "{,}", ",\\!", "\x1b", "\x1b[", "\x1b]", "\x90", "\x9b", "\x1b[1;", "\x1b]0;x", "\u200b",
    ],
)  # fmt: skip
def test_extraction_takes_linear_time(piece: str) -> None:
    """Quadratic time would take many minutes."""
    text = piece * (MUCH // len(piece)) + "1234 answer "
    for function in (last_boxed, final_answer, last_letter, last_number, plain):
        function(text)


def test_boxes_in_boxes_a_hundred_thousand_deep() -> None:
    assert last_boxed("\\boxed{" * 100_000 + "5" + "}" * 100_000) == "5"
    assert last_boxed("\\boxed{x" * 100_000 + "5" + "}" * 100_000) == "x" + "{x" * 99_999 + "5" + "}" * 99_999
    assert last_boxed("\\boxed{" * 100_000 + "5" + "}" * 99_999) == "5"
    assert last_boxed("\\boxed{" * 100_000 + "5") is None
